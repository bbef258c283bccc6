"""The options that all policy gradients share, as a paper would state them.

`PolicyRecipe` is an option group of a command line; each algorithm adds its own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

from rlhf_jax.algorithms.flow import shaping
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.surrogates import CLIP, Surrogate
from rlhf_jax.functional import aggregation, checks, losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty
from rlhf_jax.functional.off_policy import importance
from rlhf_jax.functional.off_policy.importance import Correction


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
    surrogate: Surrogate = CLIP
    """Surrogate of the policy gradient: clip, cispo or sapo. clip is PPO's:
    clip_range=0.2 clips probability ratios to [1 − ε, 1 + ε], clip_range_high= is
    another ε above 1 (clip-higher: 0.28), and dual_clip= bounds ratios where the
    advantage is negative. cispo bounds the ratio as a weight of log-probs, by the same
    two ranges, so that every token keeps its gradient. sapo has a soft gate, of
    temperature_pos=1 where the advantage is positive and temperature_neg=1.05
    elsewhere. ratio_level=token is the ratio of each token, sequence the geometric mean
    over its response (GSPO); with clip and sapo sequence_token has that value and the
    gradient of the token's own, for advantages that differ within a response."""
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
        checks.positive(
            temperature=self.temperature,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
        )
        checks.non_negative(
            entropy_coef=self.entropy_coef,
            ptx_coef=self.ptx_coef,
            truncate_after=self.truncate_after,
        )
        if self.stop_approxkl is not None:
            checks.positive(stop_approxkl=self.stop_approxkl)
        if self.max_ratio_mean is not None and not 1 < self.max_ratio_mean < math.inf:
            raise InputError(
                f"max_ratio_mean: expected a finite number above 1, as it bounds a "
                f"ratio that starts at 1, got {self.max_ratio_mean}; choose another, "
                f"or leave it out"
            )
        self._check_correction()
        if self.continuous_batching is not None:
            checks.positive(continuous_batching=self.continuous_batching)
        checks.one_of(aggregation=self.aggregation, among=get_args(losses.Aggregation))
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
