"""The options that all policy gradients share.

`PolicyRecipe` is an option group of a command line; each algorithm adds its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

from rlhf_jax.algorithms.flow import shaping
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.corrections import SamplerCorrection, Weighted
from rlhf_jax.algorithms.policy_gradient.loss import Loss
from rlhf_jax.algorithms.policy_gradient.options import (
    DAR,
    DPPO,
    GMPO,
    TOPR,
    VESPO,
    Centred,
    EntropyTarget,
    GradientPenalty,
    TokenChoice,
)
from rlhf_jax.algorithms.policy_gradient.routing_replay import RoutingReplay
from rlhf_jax.functional import aggregation, checks, losses
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty
from rlhf_jax.functional.losses import RatioLevel

WeightLevel = Literal["token", "sequence"]


@dataclasses.dataclass(frozen=True)
class Clip:
    """PPO's surrogate, whose gradient is 0 where the clip binds."""

    clip_range: float = 0.2
    """ε: probability ratios are clipped to [1 − ε, 1 + ε]."""
    clip_range_high: float | None = None
    """Clip range above 1; None is clip_range (clip-higher: 0.28)."""
    dual_clip: float | None = None
    """Dual-clip bound c > 1 of ratios where the advantage is negative; None disables
    it."""
    ratio_level: RatioLevel = "token"
    """Ratio of a token: its own, or that of its response (`surrogates.at_level`)."""

    def __post_init__(self) -> None:
        checks.positive(
            clip_range=self.clip_range, clip_range_high=self.clip_range_high
        )
        checks.within(
            above=1,
            advice="a ratio starts at 1: choose another, or leave it out",
            dual_clip=self.dual_clip,
        )
        checks.one_of(ratio_level=self.ratio_level, among=get_args(RatioLevel))

    @property
    def loss(self) -> Loss:
        """`losses.policy_loss`."""
        return functools.partial(losses.policy_loss, **vars(self))


@dataclasses.dataclass(frozen=True)
class CISPO:
    """Log-probs weighted by the clipped ratio: every token keeps its gradient."""

    clip_range: float = 0.2
    """ε: weights are at least 1 − ε; 1 or more is no lower bound."""
    clip_range_high: float | None = None
    """ε_high: weights are at most 1 + ε_high; None is clip_range."""
    ratio_level: WeightLevel = "token"
    """Ratio of a token: its own, or that of its response (sequence). sequence_token
    would equal sequence, as the weight has no gradient."""

    def __post_init__(self) -> None:
        checks.positive(
            clip_range=self.clip_range, clip_range_high=self.clip_range_high
        )
        checks.one_of(ratio_level=self.ratio_level, among=get_args(WeightLevel))

    @property
    def loss(self) -> Loss:
        """`losses.cispo_loss`."""
        return functools.partial(losses.cispo_loss, **vars(self))


@dataclasses.dataclass(frozen=True)
class SAPO:
    """A soft gate of the ratio in place of the clip."""

    temperature_pos: float = 1.0
    """Temperature of the gate where the advantage is positive."""
    temperature_neg: float = 1.05
    """Temperature of the gate where the advantage is not positive."""
    ratio_level: RatioLevel = "token"
    """Ratio of a token: its own, or that of its response (`surrogates.at_level`)."""

    def __post_init__(self) -> None:
        checks.positive(
            temperature_pos=self.temperature_pos, temperature_neg=self.temperature_neg
        )
        checks.one_of(ratio_level=self.ratio_level, among=get_args(RatioLevel))

    @property
    def loss(self) -> Loss:
        """`losses.sapo_loss`."""
        return functools.partial(
            losses.sapo_loss,
            temperature=self.temperature_pos,
            negative_temperature=self.temperature_neg,
            ratio_level=self.ratio_level,
        )


Surrogate = Clip | CISPO | SAPO | DPPO | GMPO | VESPO | TOPR | DAR | Centred
CLIP = Clip()


@dataclasses.dataclass(frozen=True)
class FixedLength:
    """Responses are sampled to their full length, then truncated at a stop token."""

    truncate_after: int = 0
    """Number of tokens at the start of a response among which a stop token does not end
    it."""
    reward_only: bool = False
    """Whether only the reward reads the truncated response."""

    def __post_init__(self) -> None:
        checks.non_negative(truncate_after=self.truncate_after)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRecipe:
    """Options of sampling, of the scores, and of the policy's loss and updates."""

    temperature: float = 0.7
    """Temperature that divides the logits in every role."""
    fixed_length: FixedLength | None = None
    """Samples every response to its full length, then truncates it at its first stop
    token after this number of tokens, as 0 or 16,reward_only=true (openai-2019). With
    reward_only=true only the reward reads the truncated response: the policy is trained
    on all tokens, with the score on the last one. None ends a response at its first
    stop token while sampling."""
    continuous_batching: int | None = None
    """Number of responses sampled at a time by continuous batching: the next prompt
    takes the place of a finished response; None samples all rows at once. Samples are
    equal up to rounding, which may decide a draw that falls between two tokens."""
    penalty: Penalty = IN_REWARD
    """Estimator of the KL and where its penalty acts."""
    scores: ScoreShaping = shaping.AS_THEY_ARE
    """Shaping of the reward's scores."""
    sampler_correction: SamplerCorrection | None = None
    """Correction for a sampler that is not the trainer: ratio, recompute, truncate,
    mask or reject. ratio takes the sampler's log-probs as old_logprobs, and the clip
    bounds the ratio to them. With the others the trainer recomputes old_logprobs;
    recompute does only that, for training in bfloat16. truncate, mask and reject also
    multiply the advantage of a token by an importance weight: the trainer's probability
    of the token over the sampler's, or of its response with level=sequence. truncate
    bounds weights by cap=2; mask sets them to 0 beyond cap= and floor= (IcePop:
    mask,cap=5,floor=0.5); reject leaves out responses beyond cap= and floor=, by their
    ratio or, with level=geometric, its geometric mean over tokens. None is truncate
    with --max-staleness above 0, and ratio otherwise."""
    surrogate: Surrogate = CLIP
    """Surrogate of the policy gradient. clip is PPO's: clip_range=0.2 clips probability
    ratios to [1 − ε, 1 + ε], clip_range_high= is another ε above 1 (clip-higher: 0.28),
    and dual_clip= bounds ratios where the advantage is negative. cispo weights
    log-probs by the ratio, clipped to the same range, so that every token keeps its
    gradient. sapo has a soft gate, with temperature_pos=1 where the advantage is
    positive and temperature_neg=1.05 elsewhere. ratio_level=token is the ratio of each
    token, sequence its geometric mean over the response (GSPO), sequence_token the same
    value with the token's own gradient. dppo leaves out tokens whose probability moved
    by more than threshold=0.15 (divergence=kl: 0.05 nats), and weights the others by
    their ratio up to cap=20. gmpo takes the geometric mean of ratios whose logs are
    clipped at clip_range=0.4. vespo weights a response with ratio W by
    W^power·exp(decay·(1 − W)), with power_pos=2, decay_pos=3, power_neg=3 and
    decay_neg=2. topr weights worse responses by min(W, 1), and others by 1. dar weights
    the log-likelihood of a response by (π_ref/π_old)^share·exp(A/beta), with share=0.1
    and beta=0.05, up to cap=20. centred subtracts from each score its mean under the
    sampler, which records its top_k=128 tokens; cap=2 weights tokens by their ratio up
    to cap, and with floor= too, weights beyond either bound are 0."""
    off_policy_mask: float | None = None
    """Bound δ of the mean log μ/π over the tokens of a response, nats per token, μ the
    sampler: responses above it with a negative advantage are left out of the policy
    loss (DeepSeek-V3.2); None disables it."""
    token_choice: TokenChoice | None = None
    """Tokens of a batch that the policy loss covers: top_entropy takes the share=0.2
    with the largest entropies; clip_cov leaves out up to share=0.0002, drawn among
    those whose covariance of log-prob and advantage is between low=1 and high=5; kl_cov
    takes all, and adds coef=1 times |log π − log π_old| at the share=0.002 with the
    largest covariances; None takes all."""
    gradient_penalty: GradientPenalty | None = None
    """Gradient regularisation in place of a KL: strength=γ weights half the squared
    norm of the policy's gradient, from a finite difference over step=0.001 along it
    (--dtype bfloat16 needs step=0.01, as it rounds smaller steps away), with both
    gradients clipped to max_norm=10; None disables it."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with entropy_control, the weight at the start."""
    entropy_control: EntropyTarget | None = None
    """Entropy, nats per token, at or below which there is a bonus: its weight grows by
    increment=0.005 in each such iteration, up to largest=1, and shrinks by as much in
    the others (Skywork-OR1: 0.2). None keeps entropy_coef."""
    routing_replay: RoutingReplay | None = None
    """Experts to which the trainer routes the tokens of a mixture: sampler replays the
    sampler's choice (R3), old that of the policy before the updates (R2), with
    reference=true in references too. None lets each pass choose."""
    balance_coef: float = 0.0
    """Weight of the balance loss of a mixture's routers."""
    ptx_coef: float = 0.0
    """Weight of a language-model loss on texts mixed in (InstructGPT: 27.8)."""
    aggregation: losses.Aggregation = "token_mean"
    """Aggregation of the token losses: token_mean is the mean over all tokens;
    sequence_mean over each response, then over responses; prompt_mean over the tokens
    of all responses to a prompt, then over prompts; constant divides each response's
    sum by a constant, and alone is unbiased where responses differ in length."""
    loss_scale_factor: float | None = None
    """With aggregation constant: divisor of a response's sum, tokens; None is
    max_new_tokens, and 1 gives gradients of the objective's size."""
    num_epochs: int = 4
    """Number of passes over each batch."""
    num_minibatches: int = 1
    """Number of optimizer steps per pass."""
    micro_batch_size: int | None = None
    """Responses per forward and backward pass; None is a whole minibatch."""
    stop_approxkl: float | None = None
    """Approximate KL between sampler and policy, nats per token, above which the
    updates on a batch end; None disables it."""
    max_ratio_mean: float | None = None
    """Mean ratio above which a minibatch is left out (TRL: 10); None disables it."""

    def __post_init__(self) -> None:
        checks.positive(
            temperature=self.temperature,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            stop_approxkl=self.stop_approxkl,
            off_policy_mask=self.off_policy_mask,
            continuous_batching=self.continuous_batching,
        )
        checks.non_negative(
            entropy_coef=self.entropy_coef,
            ptx_coef=self.ptx_coef,
            balance_coef=self.balance_coef,
        )
        if self.entropy_control is not None:
            checks.within(
                most=self.entropy_control.largest,
                advice="entropy_control starts from it: lower it, or raise largest",
                entropy_coef=self.entropy_coef,
            )
        checks.within(
            above=1,
            advice="a ratio starts at 1: choose another, or leave it out",
            max_ratio_mean=self.max_ratio_mean,
        )
        checks.one_of(aggregation=self.aggregation, among=get_args(losses.Aggregation))
        if self.reads_reference:
            expect_none(
                "with surrogate dar, whose weight is exponential in the advantage",
                advice="leave one of them out",
                sampler_correction=self.weighted,
                off_policy_mask=self.off_policy_mask,
                token_choice=self.token_choice,
            )
        if self.recorded_top_k is not None:
            recomputed = self.sampler_correction if self.recomputes_logprobs else None
            expect_none(
                "with surrogate centred, which reads the sampler's own log-probs, of "
                "every token",
                advice="leave one of them out",
                sampler_correction=recomputed,
                token_choice=self.token_choice,
            )
            expect_none(
                "with surrogate centred, as no likeliest tokens are recorded then",
                advice="leave one of them out",
                continuous_batching=self.continuous_batching,
            )
        if self.loss_scale_factor is not None:
            aggregation.check_scale(
                self.aggregation, loss_scale_factor=self.loss_scale_factor
            )

    def minibatch_size(self, rows: int, *, unit: str = "rows") -> int:
        """Returns the rows of a minibatch; InputError if sizes do not divide."""
        size = rows // self.num_minibatches
        micro_size = size if self.micro_batch_size is None else self.micro_batch_size
        for name, count, whole, divisor in (
            ("num_minibatches", rows, "batch", self.num_minibatches),
            ("micro_batch_size", size, "minibatch", micro_size),
        ):
            if count < 1 or divisor < 1 or count % divisor:
                raise checks.InputError(
                    f"expected {name} to divide the {count} {unit} of a {whole}, got "
                    f"{divisor}; change either, or leave {name} out"
                )
        return size

    @property
    def rows_per_prompt(self) -> int:
        """Number of neighbouring rows with the same prompt, which is then run once."""
        return 1

    @property
    def trained_share(self) -> float:
        """Share of an iteration's responses that the update is trained on."""
        return 1.0

    @property
    def reads_reference(self) -> bool:
        """Whether the policy loss itself reads the reference's log-probs."""
        return isinstance(self.surrogate, DAR)

    @property
    def recorded_top_k(self) -> int | None:
        """Number of likeliest tokens that the sampler records per position, or None."""
        return self.surrogate.top_k if isinstance(self.surrogate, Centred) else None

    @property
    def has_ratio(self) -> bool:
        """Whether the loss has a probability ratio that a stale sampler biases."""
        return not isinstance(self.surrogate, Centred)  # it corrects by itself

    @property
    def truncates_reward_only(self) -> bool:
        """Whether the policy is trained on tokens that the reward does not read."""
        return self.fixed_length is not None and self.fixed_length.reward_only

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether old_logprobs are the trainer's; else they are the sampler's."""
        correction = self.sampler_correction
        return correction is not None and correction.recomputes

    @property
    def reference_replays(self) -> bool:
        """Whether the references' tokens go to the recorded experts too."""
        return self.routing_replay is not None and self.routing_replay.reference

    @property
    def weighted(self) -> Weighted | None:
        """The correction by importance weights; None if there is none."""
        correction = self.sampler_correction
        return correction if isinstance(correction, Weighted) else None
