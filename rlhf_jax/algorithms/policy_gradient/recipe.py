"""The options that all policy gradients share, as a paper would state them.

`PolicyRecipe` is an option group of a command line; each algorithm adds its own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from rlhf_jax.algorithms.flow import shaping
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.functional import aggregation, checks, losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty
from rlhf_jax.functional.off_policy import importance
from rlhf_jax.functional.off_policy.importance import Correction

Surrogate = Literal["clip", "cispo", "sapo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRecipe:
    """How responses are sampled, what becomes of their scores, how the policy moves."""

    temperature: float = 0.7
    """Temperature that divides the logits in every role."""
    fixed_length: bool = False
    """Whether every response is sampled to its full length, then truncated at a stop
    token."""
    truncate_after: int = 0
    """With fixed_length: number of tokens at the start of a response in which a stop
    token does not end it (openai-2019: 16)."""
    truncate_reward_only: bool = False
    """With fixed_length: whether only the reward sees the truncated response; the
    policy is trained on all of it, and its score lands on the last token
    (openai-2019)."""
    continuous_batching: int | None = None
    """Number of responses sampled at a time by continuous batching: a finished one
    makes room for the next prompt; None samples all rows at once. Samples are the same
    up to rounding, which may decide a draw that falls between two tokens."""
    penalty: Penalty = IN_REWARD
    """Estimator of the KL and where its penalty acts."""
    scores: ScoreShaping = shaping.AS_THEY_ARE
    """Shaping of the reward's scores."""
    recompute_logprobs: bool = False
    """Whether the trainer recomputes old_logprobs instead of taking the sampler's, for
    training in bfloat16 or sampling in int8."""
    sampler_weight_cap: float | None = None
    """With recompute_logprobs: cap of the importance weight of each token, the
    trainer's probability over the sampler's, by which its advantage is multiplied (2 is
    usual); None takes the tokens as the trainer's own."""
    sampler_correction: Correction = "token_truncate"
    """With sampler_weight_cap: importance weight of a token and what the cap does to
    it. token has the ratio of the token, sequence that of its response. truncate bounds
    it; mask makes it 0 beyond the bounds; reject leaves out responses beyond them, by
    their ratio (sequence) or its geometric mean over tokens (geometric)."""
    sampler_weight_floor: float | None = None
    """With sampler_weight_cap and a correction that masks or rejects: lower bound of
    the ratio (IcePop: 0.5 with a cap of 5); None bounds it from above alone."""
    clip_range: float = 0.2
    """PPO clip range ε: probability ratios are clipped to [1 − ε, 1 + ε]."""
    clip_range_high: float | None = None
    """Clip range above 1: probability ratios are clipped to at most 1 + this; None is
    clip_range (clip-higher: 0.28)."""
    dual_clip: float | None = None
    """Dual-clip bound c > 1 of probability ratios where the advantage is negative; None
    disables it."""
    ratio_level: losses.RatioLevel = "token"
    """Probability ratio of a token: token is its own; sequence is the geometric mean
    over its response (GSPO); sequence_token has that value and the gradient of the
    token's own, for advantages that differ within a response."""
    surrogate: Surrogate = "clip"
    """Surrogate of the policy gradient: clip is PPO's, whose gradient is 0 beyond the
    clip; cispo bounds the ratio as a weight of log-probs, and keeps every token's
    gradient; sapo has a soft gate in place of the clip."""
    sapo_temperature_pos: float = 1.0
    """With surrogate sapo: temperature of the gate where the advantage is positive."""
    sapo_temperature_neg: float = 1.05
    """With surrogate sapo: temperature of the gate where it is not."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ptx_coef: float = 0.0
    """Weight of a language-model loss on texts mixed in (InstructGPT: 27.8)."""
    aggregation: losses.Aggregation = "token_mean"
    """Mean of the token losses: token_mean is over all tokens; sequence_mean over each
    response, then over responses; prompt_mean over the responses to each prompt, then
    over prompts; constant divides each response's sum by a constant, and alone is
    unbiased where responses differ in length."""
    loss_scale_factor: float | None = None
    """With aggregation constant: the divisor of a response's sum, tokens; None is
    max_new_tokens, and 1 gives gradients the size of the objective's."""
    num_epochs: int = 4
    """Number of passes over each batch."""
    num_minibatches: int = 1
    """Number of optimizer steps per pass."""
    micro_batch_size: int | None = None
    """Responses per forward and backward pass; None is a minibatch."""
    stop_approxkl: float | None = None
    """Approximate KL between sampler and policy, nats per token, above which the
    updates on a batch end; None disables it."""
    max_ratio_mean: float | None = None
    """Mean ratio above which a minibatch is left out (TRL: 10); None disables it."""

    def __post_init__(self) -> None:
        self._check_surrogate()
        checks.positive(
            temperature=self.temperature,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            clip_range=self.clip_range,
        )
        checks.non_negative(
            entropy_coef=self.entropy_coef,
            ptx_coef=self.ptx_coef,
            truncate_after=self.truncate_after,
        )
        for name, number in {
            "clip_range_high": self.clip_range_high,
            "stop_approxkl": self.stop_approxkl,
        }.items():
            if number is not None:
                checks.positive(**{name: number})
        for name, number in {
            "dual_clip": self.dual_clip,
            "max_ratio_mean": self.max_ratio_mean,
        }.items():
            if number is not None and not 1 < number < math.inf:
                raise InputError(
                    f"{name}: expected a finite number above 1, as it bounds a ratio "
                    f"that starts at 1, got {number}; choose another, or leave it out"
                )
        self._check_correction()
        if self.continuous_batching is not None:
            checks.positive(continuous_batching=self.continuous_batching)
        one_of(aggregation=self.aggregation, among=get_args(losses.Aggregation))
        if self.loss_scale_factor is not None:
            aggregation.check_scale(
                self.aggregation, loss_scale_factor=self.loss_scale_factor
            )
        for name, value in {
            "truncate_after": self.truncate_after,
            "truncate_reward_only": self.truncate_reward_only,
        }.items():
            if value and not self.fixed_length:
                raise InputError(
                    f"{name}: expected fixed_length with it, got {value} without, "
                    f"where the sampler ends a response at its first stop token; set "
                    f"fixed_length, or leave it out"
                )

    @property
    def has_ratio(self) -> bool:
        """Whether the loss has a probability ratio, which a stale sampler biases."""
        return True

    def _check_correction(self) -> None:
        """Raises InputError for a correction without bounds or log-probs to read."""
        cap, floor = self.sampler_weight_cap, self.sampler_weight_floor
        if cap is None:
            for name, value, default in (
                ("sampler_correction", self.sampler_correction, "token_truncate"),
                ("sampler_weight_floor", floor, None),
            ):
                if value != default:
                    raise InputError(
                        f"{name}: expected sampler_weight_cap with it, got {value!r} "
                        f"without, where tokens are taken as the trainer's own; set "
                        f"sampler_weight_cap, or leave it out"
                    )
            return
        importance.check_bounds(self.sampler_correction, cap=cap, floor=floor)
        if not self.recompute_logprobs:
            raise InputError(
                f"sampler_weight_cap: expected recompute_logprobs with it, got {cap} "
                f"without, where the ratio is to the sampler's log-probs already; set "
                f"recompute_logprobs, or leave it out"
            )

    def _check_surrogate(self) -> None:
        """Raises InputError for an option that the surrogate does not read."""
        one_of(surrogate=self.surrogate, among=get_args(Surrogate))
        one_of(ratio_level=self.ratio_level, among=get_args(losses.RatioLevel))
        gates = {
            "sapo_temperature_pos": (self.sapo_temperature_pos, 1.0),
            "sapo_temperature_neg": (self.sapo_temperature_neg, 1.05),
        }
        checks.positive(**{name: value for name, (value, _) in gates.items()})
        unread = {"dual_clip": self.dual_clip is not None}
        if self.surrogate == "clip":
            unread = {}
        if self.surrogate == "sapo":
            unread["clip_range_high"] = self.clip_range_high is not None
            unread["clip_range"] = self.clip_range != PolicyRecipe.clip_range
        else:
            for name, (value, default) in gates.items():
                unread[name] = value != default
        for name, is_set in unread.items():
            if is_set:
                raise InputError(
                    f"{name}: expected none with surrogate {self.surrogate!r}, which "
                    f"does not read it, got {getattr(self, name)}; leave it out, or "
                    f"choose another surrogate"
                )
        if self.surrogate == "cispo" and self.ratio_level == "sequence_token":
            raise InputError(
                "ratio_level: expected 'token' or 'sequence' with surrogate 'cispo', "
                "whose weight has no gradient, got 'sequence_token'; choose 'sequence'"
            )


def one_of(*, among: tuple[Any, ...], **choices: Any) -> None:
    """Raises InputError by name for a choice that is none of `among`."""
    for name, choice in choices.items():
        if choice not in among:
            raise InputError(
                f"{name}: expected one of {', '.join(map(repr, among))}, got "
                f"{choice!r}; choose one"
            )
