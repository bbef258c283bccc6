"""The records a batch passes through, from prompts to what the update reads.

    Prompts ─rollout─> Rollout ─score─> Scored ─experience─> Experience ─update─> state

B rows, P prompt columns, R response columns, S = P + R. Column t of every
per-token array is about `tokens[:, t]`:

    column            0    1    2    3    4    5    6
    tokens            ·    ·   The  cat  sat  EOS   ·
    mask              0    0    1    1    1    1    0
    response_mask     0    0    0    0    1    1    0     (P = 4)
    logprobs[t]       log π(tokens[t] | tokens[<t]); column 0 is 0, and so is the first
                      token of a row, which nothing predicts
    values[t]         value of the state just before tokens[t]

An episode of several turns is a row, too: what the policy sampled and what it read
between its turns stand in one run of tokens from column P on.

    column            0   1   2   3   4   5   6   7   8   9
    tokens            ·   p   p   a   E   o   o   b   E   ·    E: a stop token
    mask              0   1   1   1   1   1   1   1   1   0
    response_mask     0   0   0   1   1   0   0   1   1   0    sampled (P = 3)
    observed          0   0   0   0   0   1   1   0   0   0    context of what follows
    turn_rewards      0   0   0   0   r   0   0   0   0   0    the last turn's reward is
                                                               the rest of the score
Everything per token (log-probs, entropy, KL, advantages, losses, counts) is about the
sampled tokens; a number that an array has at an observed one is 0.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int32

from rlhf_jax.functional import masked
from rlhf_jax.models.generation.sampling import TopK
from rlhf_jax.models.packing import SizedPacking
from rlhf_jax.roles.reference.frozen import Further

Array = jax.Array


@flax.struct.dataclass
class Prompts:
    """Left-padded prompts: the last prompt token stands in the last column."""

    tokens: Int32[Array, "B P"]
    mask: Bool[Array, "B P"]  # True at tokens, False at padding
    index: Int32[Array, " B"]  # row of the data set
    sample: Int32[Array, " B"]  # which sample of that prompt; no two rows have both


@flax.struct.dataclass
class Rollout:
    """Prompts with sampled responses, as the sampler saw them.

    Three policies are kept apart. μ drew the tokens (`sampler_logprobs`), π_old is the
    trainer before the update (`old_logprobs`), and π is what the update moves.
    """

    tokens: Int32[Array, "B S"]
    mask: Bool[Array, "B S"]  # not padding
    response_mask: Bool[Array, "B S"]  # sampled tokens, EOS included
    old_logprobs: Float32[Array, "B S"]  # nats, 0 outside the response
    entropy: Float32[Array, "B S"]  # nats, of each token's distribution
    index: Int32[Array, " B"]
    sample: Int32[Array, " B"]
    # Nats, 0 outside the response, of μ; None where the sampler is the trainer, or is
    # taken for it: then `old_logprobs` are its own.
    sampler_logprobs: Float32[Array, "B S"] | None = None
    # Of the parameters that drew each token, 0 outside the response: `TrainState.step`
    # of that time, iterations done. None where nobody counts.
    version: Int32[Array, "B S"] | None = None
    # Of a mixture, the k experts that a token meets in each of L layers where routing
    # is replayed, -1 where its router chooses. None replays none.
    experts: Int32[Array, "B S L k"] | None = None
    # [B, S, k], of the distributions that tokens were drawn from; None records none.
    top_k: TopK | None = None

    @property
    def behaviour_logprobs(self) -> Array:
        """f32[B, S], nats: log μ, of whoever drew the tokens."""
        if self.sampler_logprobs is None:
            return self.old_logprobs
        return self.sampler_logprobs

    @property
    def observed(self) -> Array:
        """bool[B, S]: tokens between two turns, which the policy read.

        Where an episode ends with an observation, its tokens too.
        """
        began = jnp.cumsum(self.response_mask, axis=1, dtype=jnp.int32) > 0
        return self.mask & ~self.response_mask & began


@flax.struct.dataclass
class ReferenceOutput:
    """What the reference computes of a rollout, in one forward pass on its devices.

    With its head, hidden states are its distribution at every token, in D' numbers and
    not in V.
    """

    logprobs: Float32[Array, "B S"]  # nats, 0 outside the response
    # After the final norm, in the compute dtype; None where nothing reads them.
    hidden: Float[Array, "B S D"] | None = None
    # Responses that a self-teacher read a demonstration for; the others are not trained
    # on. None: all are.
    taught: Bool[Array, " B"] | None = None


@flax.struct.dataclass
class Scored:
    """A rollout with what the frozen models and the critic say of it."""

    rollout: Rollout
    scores: Float32[Array, " B"]  # reward units, one per response
    values: Float32[Array, "B S"] | None  # reward units; None without a critic
    ref_logprobs: Float32[Array, "B S"] | None  # nats; None without a reference
    kl: Float32[Array, "B S"] | None  # nats, what goes into the reward; None if off
    kl_stats: masked.Stats = flax.struct.field(default_factory=dict)  # of its clipping
    # Reward units, of the turns before the last, each at its turn's last sampled token;
    # part of `scores`. None where episodes have one turn.
    turn_rewards: Float32[Array, "B S"] | None = None
    # The last sampled token of every turn; None where nobody says.
    turn_ends: Bool[Array, "B S"] | None = None
    # Responses that have a score: the others have no token, and count nowhere. None is
    # all.
    row_mask: Bool[Array, " B"] | None = None
    # What `scores` are the weighted sum of, before their shaping; () where it is one.
    rewards: tuple[Float32[Array, " B"], ...] = ()
    weights: tuple[float, ...] = flax.struct.field(pytree_node=False, default=())


@flax.struct.dataclass
class Sampled:
    """What the sampler says of the tokens it drew, for the ledger of trust."""

    logprobs: Float32[Array, "B S"]  # nats, log μ
    # Tokens that the policy drew, those that are not trained on among them.
    mask: Bool[Array, "B S"]
    age: Int32[Array, "B S"]  # iterations since their parameters; 0 outside the mask


@flax.struct.dataclass
class PolicyExperience:
    """What a policy gradient reads; fixed while the epochs run."""

    tokens: Int32[Array, "B S"]
    mask: Bool[Array, "B S"]
    response_mask: Bool[Array, "B S"]  # response tokens that are trained on
    old_logprobs: Float32[Array, "B S"]  # nats
    ref_logprobs: Float32[Array, "B S"] | None  # nats
    token_rewards: Float32[Array, "B S"]  # reward units
    advantages: Float32[Array, "B S"]  # reward units (or unit variance if normalised)
    # Tokens, of `aggregation.prompt_scale`; None unless the aggregation is prompt_mean.
    prompt_scale: Float32[Array, " B"] | None = flax.struct.field(
        default=None, kw_only=True
    )
    # Log-probs f32[B, S] and weights of the references beside the first one, by name.
    further: dict[str, Further] = flax.struct.field(default_factory=dict, kw_only=True)
    # As in `ReferenceOutput`; None runs the reference in the update, if at all.
    ref_hidden: Float[Array, "B S D"] | None = flax.struct.field(
        default=None, kw_only=True
    )
    # Nats, log μ of the tokens; None unless advantages are corrected for who drew them.
    sampler_logprobs: Float32[Array, "B S"] | None = flax.struct.field(
        default=None, kw_only=True
    )
    # Of all tokens that were drawn; None keeps no ledger of them.
    sampled: Sampled | None = flax.struct.field(default=None, kw_only=True)
    # Reward units per nat, equal in all rows; None: that of the recipe.
    entropy_coef: Float32[Array, " B"] | None = flax.struct.field(
        default=None, kw_only=True
    )
    # Of `token_choice`: tokens that have an advantage, or that KL-Cov holds. None: all.
    chosen: Bool[Array, "B S"] | None = flax.struct.field(default=None, kw_only=True)
    # As in `Rollout`.
    experts: Int32[Array, "B S L k"] | None = flax.struct.field(
        default=None, kw_only=True
    )
    top_k: TopK | None = flax.struct.field(default=None, kw_only=True)

    @property
    def behaviour_logprobs(self) -> Array:
        """f32[B, S], nats, of the policy whose samples these are taken to be."""
        if self.sampler_logprobs is None:
            return self.old_logprobs
        return self.sampler_logprobs

    def laid_out(self, x: Array) -> Array:
        """An array [B, S] of the rollout, in the rows and columns of these."""
        return x


@flax.struct.dataclass
class Experience(PolicyExperience):
    """What an update of PPO reads, the critic's part included."""

    value_mask: Bool[Array, "B S"]  # states with a value; a column longer in N+
    old_values: Float32[Array, "B S"]  # reward units
    returns: Float32[Array, "B S"]  # reward units


@flax.struct.dataclass
class PairExperience(PolicyExperience):
    """What online DPO reads: a row is a pair, its chosen response and the rejected one.

    columns     0 ... S-1                  S ... 2S-1
    tokens      prompt and chosen          the same prompt and rejected
    """

    pairs: Bool[Array, " B"]  # that are trained on
    rejected_better: Float32[Array, " B"]  # probability of the opposite preference
    members: Int32[Array, "B 2"]  # rows of the rollout: the chosen one, the rejected

    def laid_out(self, x: Array) -> Array:
        """[B, 2S] of [N, S]: that of the chosen response, then of the rejected one."""
        return x[self.members].reshape(len(self.members), -1)


@flax.struct.dataclass
class RolloutPacking:
    """How models read the rows of an iteration packed, while its records stay padded.

    Made on the host from lengths (`data.layouts`). T optimizer steps, each over b rows
    of the batch in C parts (micro-batches) of whole responses.
    """

    # Of all rows: for the reference, the critic and `old_logprobs`.
    batch: SizedPacking
    minibatches: SizedPacking  # every leaf [T, C, ...]; of the b rows of a minibatch
    members: Bool[Array, "T C b"]  # the responses of a part; it may have none


@flax.struct.dataclass
class Sequences:
    """Right-padded texts; the language-model loss reads `response_mask` tokens."""

    tokens: Int32[Array, "B S"]
    mask: Bool[Array, "B S"]
    response_mask: Bool[Array, "B S"]  # tokens that are trained on
    # which text of its row a token belongs to, 0 at padding; None is one text per row
    segments: Int32[Array, "B S"] | None = None


@flax.struct.dataclass
class Preferences:
    """Pairs of responses to the same prompt, one pair per row."""

    chosen: Sequences
    rejected: Sequences
    margin: Float32[Array, " B"] | None = None  # required score difference; None is 0


@flax.struct.dataclass
class PackedPreferences:
    """Pairs laid end to end, up to K to a row; both texts of a pair in the same row.

    column           0   1   2   3   4   5   6   7   8   9
    tokens           p   c  EOS  p   r   r  EOS  q   c  ...
    segments         1   1   1   2   2   2   2   3   3  ...
    response_mask    0   1   1   0   1   1   1   0   1  ...

    Pair k of a row is its segments 2k + 1, prompt and chosen response, and 2k + 2, the
    same prompt and the rejected one. Attention does not cross texts.
    """

    tokens: Int32[Array, "B S"]
    segments: Int32[Array, "B S"]  # 0 at padding
    response_mask: Bool[Array, "B S"]  # tokens of the responses, EOS included
    pairs: Bool[Array, "B K"]  # True where the row has a pair of that number
    index: Int32[Array, " B"]  # row of the packed data set
    # KTO's: the chosen text is desirable, and the rejected one is of another prompt.
    labels: Bool[Array, "B K"] | None = None

    @property
    def mask(self) -> Array:
        """bool[B, S], not padding."""
        return self.segments > 0
