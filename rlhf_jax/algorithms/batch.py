"""The records a batch passes through, from prompts to what the update reads.

    Prompts ─rollout─> Rollout ─score─> Scored ─experience─> Experience ─ppo─> state

B rows, P prompt columns, R response columns, S = P + R. Column t of every
per-token array is about `tokens[:, t]`:

    column            0    1    2    3    4    5    6
    tokens            ·    ·   The  cat  sat  EOS   ·
    mask              0    0    1    1    1    1    0
    response_mask     0    0    0    0    1    1    0     (P = 4)
    logprobs[t]       log π(tokens[t] | tokens[<t]); column 0 is 0, and so is the first
                      token of a row, which nothing predicts
    values[t]         value of the state just before tokens[t]
"""

from __future__ import annotations

import flax.struct
import jax

from rlhf_jax.functional import masked

Array = jax.Array


@flax.struct.dataclass
class Prompts:
    """Left-padded prompts: the last prompt token stands in the last column."""

    tokens: Array  # i32[B, P]
    mask: Array  # bool[B, P], True at tokens, False at padding
    index: Array  # i32[B], row of the data set
    sample: Array  # i32[B], which sample of that prompt


@flax.struct.dataclass
class Rollout:
    """Prompts with sampled responses, as the sampler saw them."""

    tokens: Array  # i32[B, S]
    mask: Array  # bool[B, S], not padding
    response_mask: Array  # bool[B, S], response tokens, EOS included
    old_logprobs: Array  # f32[B, S], nats, 0 outside the response
    entropy: Array  # f32[B, S], nats, of the distribution each token was drawn from
    index: Array  # i32[B]
    sample: Array  # i32[B]


@flax.struct.dataclass
class Scored:
    """A rollout with what the frozen models and the critic say of it."""

    rollout: Rollout
    scores: Array  # f32[B], reward units, one per response
    values: Array | None  # f32[B, S], reward units; None without a critic
    ref_logprobs: Array | None  # f32[B, S], nats; None without a reference
    kl: Array | None  # f32[B, S], nats, that goes into the reward; None if none does
    kl_stats: masked.Stats = flax.struct.field(default_factory=dict)  # of its clipping


@flax.struct.dataclass
class PolicyExperience:
    """What a policy gradient reads; fixed while the epochs run."""

    tokens: Array  # i32[B, S]
    mask: Array  # bool[B, S]
    response_mask: Array  # bool[B, S]
    old_logprobs: Array  # f32[B, S], nats
    ref_logprobs: Array | None  # f32[B, S], nats
    token_rewards: Array  # f32[B, S], reward units
    advantages: Array  # f32[B, S], reward units (or unit variance if normalised)


@flax.struct.dataclass
class Experience(PolicyExperience):
    """What an update of PPO reads, the critic's part included."""

    value_mask: Array  # bool[B, S], states with a value; a column longer in N+
    old_values: Array  # f32[B, S], reward units
    returns: Array  # f32[B, S], reward units


@flax.struct.dataclass
class Sequences:
    """Right-padded texts; the language-model loss reads `response_mask` tokens."""

    tokens: Array  # i32[B, S]
    mask: Array  # bool[B, S]
    response_mask: Array  # bool[B, S], tokens that are trained on
    # i32[B, S], which text of its row a token is of, 0 at padding; None is one a row
    segments: Array | None = None


@flax.struct.dataclass
class Preferences:
    """Pairs of answers to the same prompt, row by row."""

    chosen: Sequences
    rejected: Sequences
    margin: Array | None = None  # f32[B], score difference asked for; None is 0


@flax.struct.dataclass
class PackedPreferences:
    """Pairs laid end to end, up to K to a row; both texts of a pair in the same row.

    column           0   1   2   3   4   5   6   7   8   9
    tokens           p   c  EOS  p   r   r  EOS  q   c  ...
    segments         1   1   1   2   2   2   2   3   3  ...
    response_mask    0   1   1   0   1   1   1   0   1  ...

    Pair k of a row is its segments 2k + 1, prompt and chosen answer, and 2k + 2, the
    same prompt and the rejected one: texts that do not see each other.
    """

    tokens: Array  # i32[B, S]
    segments: Array  # i32[B, S], 0 at padding
    response_mask: Array  # bool[B, S], tokens of the answers, EOS included
    pairs: Array  # bool[B, K], True where the row has a pair of that number
    index: Array  # i32[B], row of the packed data set

    @property
    def mask(self) -> Array:
        """bool[B, S], not padding."""
        return self.segments > 0
