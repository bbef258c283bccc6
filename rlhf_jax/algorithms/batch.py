"""The records of a batch, from its prompts to the experience that an update reads.

    Prompts ─rollout─> Rollout ─score─> Scored ─experience─> Experience ─update─> state

B rows, P prompt columns, R response columns, S = P + R. Column t of every
per-token array is about `tokens[:, t]`:

    column            0    1    2    3    4    5    6
    tokens            ·    ·   The  cat  sat  EOS   ·
    mask              0    0    1    1    1    1    0
    response_mask     0    0    0    0    1    1    0     (P = 4)
    logprobs[t]       log π(tokens[t] | tokens[<t]); 0 at column 0 and at the first
                      token of a row, which nothing predicts
    values[t]         value of the state just before tokens[t]

An episode of several turns is one row, too: from column P on, its sampled tokens and
the tokens that the policy observed between its turns follow each other.

    column            0   1   2   3   4   5   6   7   8   9
    tokens            ·   p   p   a   E   o   o   b   E   ·    E: a stop token
    mask              0   1   1   1   1   1   1   1   1   0
    response_mask     0   0   0   1   1   0   0   1   1   0    sampled (P = 3)
    observed          0   0   0   0   0   1   1   0   0   0    context of what follows
    turn_rewards      0   0   0   0   r   0   0   0   0   0    the last turn's reward is
                                                               the rest of the score
Every per-token quantity (log-probs, entropy, KL, advantages, losses, counts) is about
sampled tokens; per-token arrays are 0 at observed tokens.
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
    """Left-padded prompts: the last prompt token is in the last column."""

    tokens: Int32[Array, "B P"]
    mask: Bool[Array, "B P"]  # True at tokens, False at padding
    index: Int32[Array, " B"]  # row of the data set
    sample: Int32[Array, " B"]  # sample number; (index, sample) differs in every row


@flax.struct.dataclass
class Request:
    """Asks a sampler for responses to prompts."""

    prompts: Prompts
    key: Array  # of the step that learns from the responses
    version: Array | None = None  # i32[], `TrainState.step`; None stamps no token


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
    # log μ, nats, 0 outside the response; None where the sampler counts as the trainer,
    # and `old_logprobs` are the sampler's.
    sampler_logprobs: Float32[Array, "B S"] | None = None
    # `TrainState.step` of the parameters that drew each token, 0 outside the response;
    # None where it is not recorded.
    version: Int32[Array, "B S"] | None = None
    # With routing replay, the k experts of each token in each of L layers, -1 where the
    # router chooses; None replays nothing.
    experts: Int32[Array, "B S L k"] | None = None
    # [B, S, k], of the distributions that tokens were drawn from; None: not recorded.
    top_k: TopK | None = None

    @property
    def behaviour_logprobs(self) -> Array:
        """f32[B, S], nats: log μ of the policy that drew the tokens."""
        if self.sampler_logprobs is None:
            return self.old_logprobs
        return self.sampler_logprobs

    @property
    def observed(self) -> Array:
        """bool[B, S]: tokens that the policy read after its first turn.

        They stand between two turns, or at the end of an episode.
        """
        began = jnp.cumsum(self.response_mask, axis=1, dtype=jnp.int32) > 0
        return self.mask & ~self.response_mask & began


@flax.struct.dataclass
class ReferenceOutput:
    """The reference's results for a rollout, from one forward pass on its devices.

    Hidden states and the head give the distribution at every token in D' numbers
    instead of V.
    """

    logprobs: Float32[Array, "B S"]  # nats, 0 outside the response
    # After the final norm, in the compute dtype; None where nothing reads them.
    hidden: Float[Array, "B S D"] | None = None
    # Responses for which a self-teacher read a demonstration; only these are trained
    # on. None: all.
    taught: Bool[Array, " B"] | None = None


@flax.struct.dataclass
class Scored:
    """A rollout with its scores, values, reference log-probs and KL."""

    rollout: Rollout
    scores: Float32[Array, " B"]  # reward units, one per response
    values: Float32[Array, "B S"] | None  # reward units; None without a critic
    ref_logprobs: Float32[Array, "B S"] | None  # nats; None without a reference
    kl: Float32[Array, "B S"] | None  # nats, the KL in the reward; None if it has none
    kl_stats: masked.Stats = flax.struct.field(default_factory=dict)  # of the KL
    # Reward units of the turns before the last, each at the last sampled token of its
    # turn; included in `scores`. None where episodes have one turn.
    turn_rewards: Float32[Array, "B S"] | None = None
    # The last sampled token of every turn; None where it is not known.
    turn_ends: Bool[Array, "B S"] | None = None
    # Responses that have a score; the others have no token and count nowhere. None is
    # all.
    row_mask: Bool[Array, " B"] | None = None
    # The rewards whose weighted sum `scores` was before shaping; () for a single one.
    rewards: tuple[Float32[Array, " B"], ...] = ()
    weights: tuple[float, ...] = flax.struct.field(pytree_node=False, default=())


@flax.struct.dataclass
class Sampled:
    """The sampler's record of the tokens it drew, for the ledger of trust."""

    logprobs: Float32[Array, "B S"]  # nats, log μ
    # All tokens that the policy drew, also those that are not trained on.
    mask: Bool[Array, "B S"]
    age: Int32[Array, "B S"]  # iterations since their parameters; 0 outside the mask


@flax.struct.dataclass(kw_only=True)
class PolicyExperience:
    """The data that the loss of a policy gradient reads; fixed during the epochs."""

    tokens: Int32[Array, "B S"]
    mask: Bool[Array, "B S"]
    response_mask: Bool[Array, "B S"]  # response tokens that are trained on
    old_logprobs: Float32[Array, "B S"]  # nats
    ref_logprobs: Float32[Array, "B S"] | None  # nats
    token_rewards: Float32[Array, "B S"]  # reward units
    advantages: Float32[Array, "B S"]  # reward units (or unit variance if normalised)
    # `aggregation.prompt_scale`, tokens; None unless the aggregation is prompt_mean.
    prompt_scale: Float32[Array, " B"] | None = None
    # Log-probs f32[B, S] and weights of further references, by name.
    further: dict[str, Further] = flax.struct.field(default_factory=dict)
    # As in `ReferenceOutput`; None: the update runs the reference if it needs it.
    ref_hidden: Float[Array, "B S D"] | None = None
    # log μ, nats; None unless importance weights correct for the sampler.
    sampler_logprobs: Float32[Array, "B S"] | None = None
    # The sampler's record of all drawn tokens; None keeps no ledger of trust.
    sampled: Sampled | None = None
    # Reward units per nat, equal in all rows; None: `entropy_coef` of the recipe.
    entropy_coef: Float32[Array, " B"] | None = None
    # By `token_choice`: tokens with an advantage, or under KL-Cov's penalty. None: all.
    chosen: Bool[Array, "B S"] | None = None
    # As in `Rollout`.
    experts: Int32[Array, "B S L k"] | None = None
    top_k: TopK | None = None

    @property
    def behaviour_logprobs(self) -> Array:
        """f32[B, S], nats, of the policy that counts as the sampler of the tokens."""
        if self.sampler_logprobs is None:
            return self.old_logprobs
        return self.sampler_logprobs

    @property
    def responses(self) -> Bool[Array, " N"]:
        """The responses, True where one has a token that is trained on."""
        return self.response_mask.any(axis=1)

    def laid_out(self, x: Array) -> Array:
        """An array [B, S] of the rollout in the layout of this experience."""
        return x


@flax.struct.dataclass(kw_only=True)
class Experience(PolicyExperience):
    """The experience of PPO, with the critic's targets."""

    value_mask: Bool[Array, "B S"]  # states with a value; a column longer in N+
    old_values: Float32[Array, "B S"]  # reward units
    returns: Float32[Array, "B S"]  # reward units


@flax.struct.dataclass(kw_only=True)
class PairExperience(PolicyExperience):
    """The experience of online DPO: a row is a pair, chosen response then rejected one.

    columns     0 ... S-1                  S ... 2S-1
    tokens      prompt and chosen          the same prompt and rejected
    """

    pairs: Bool[Array, " B"]  # pairs that are trained on
    rejected_better: Float32[Array, " B"]  # probability of the opposite preference
    members: Int32[Array, "B 2"]  # rows of the rollout: chosen, rejected

    @property
    def responses(self) -> Bool[Array, " N"]:
        """bool[2B], True where a response has a token that is trained on."""
        return self.response_mask.reshape(2 * len(self.members), -1).any(axis=1)

    def laid_out(self, x: Array) -> Array:
        """[N, S] -> [B, 2S]: the chosen response's row, then the rejected one's."""
        return x[self.members].reshape(len(self.members), -1)


@flax.struct.dataclass
class RolloutPacking:
    """The packed layout in which models read an iteration, whose records stay padded.

    The host makes it from lengths (`data.layouts`). An update has T optimizer steps,
    each over b rows of the batch in C parts (micro-batches) of whole responses.
    """

    # The layout of all rows, for the reference, the critic and `old_logprobs`.
    batch: SizedPacking
    minibatches: SizedPacking  # every leaf [T, C, ...]; of the b rows of a minibatch
    members: Bool[Array, "T C b"]  # the responses of a part, which may have none


@flax.struct.dataclass
class Sequences:
    """Right-padded texts; the language-model loss reads `response_mask` tokens."""

    tokens: Int32[Array, "B S"]
    mask: Bool[Array, "B S"]
    response_mask: Bool[Array, "B S"]  # tokens that are trained on
    # number of a token's text within its row, 0 at padding; None is one text per row
    segments: Int32[Array, "B S"] | None = None


@flax.struct.dataclass
class Preferences:
    """Pairs of responses to the same prompt, one pair per row."""

    chosen: Sequences
    rejected: Sequences
    margin: Float32[Array, " B"] | None = None  # required score difference; None is 0


@flax.struct.dataclass
class PackedPreferences:
    """Pairs packed end to end, up to K per row; both texts of a pair are in one row.

    column           0   1   2   3   4   5   6   7   8   9
    tokens           p   c  EOS  p   r   r  EOS  q   c  ...
    segments         1   1   1   2   2   2   2   3   3  ...
    response_mask    0   1   1   0   1   1   1   0   1  ...

    Pair k of a row has segment 2k + 1, prompt and chosen response, and segment 2k + 2,
    the same prompt and the rejected response. Attention does not cross texts.
    """

    tokens: Int32[Array, "B S"]
    segments: Int32[Array, "B S"]  # 0 at padding
    response_mask: Bool[Array, "B S"]  # tokens of the responses, EOS included
    pairs: Bool[Array, "B K"]  # True where the row has a pair k
    index: Int32[Array, " B"]  # row of the packed data set
    # KTO: whether the chosen text is desirable; the rejected one has another prompt.
    labels: Bool[Array, "B K"] | None = None

    @property
    def mask(self) -> Array:
        """bool[B, S], not padding."""
        return self.segments > 0
