"""The options that all policy gradients share, as a paper would state them.

`PolicyRecipe` is an option group of a command line; each algorithm adds its own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

from rlhf_jax.algorithms.flow import shaping
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.functional import aggregation, checks, losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRecipe:
    """How responses are sampled, what becomes of their scores, how the policy moves."""

    temperature: float = 0.7
    """Divides the logits in every role."""
    fixed_length: bool = False
    """Sample every response to its full length, then truncate it at a stop token."""
    truncate_after: int = 0
    """With fixed_length: tokens of a response among which none ends it; 16 in OAI."""
    truncate_reward_only: bool = False
    """With fixed_length: only the reward sees the truncated response; the policy is
    trained on all of it, and its score lands on the last token (OAI)."""
    slots: int | None = None
    """Responses sampled at a time, a finished one's place going to the next prompt;
    None is a place for every row of a batch. Samples are the same up to rounding, which
    may decide a draw that falls between two tokens."""
    penalty: Penalty = IN_REWARD
    """How the KL acts."""
    scores: ScoreShaping = shaping.AS_THEY_ARE
    """What becomes of the reward's scores."""
    reprice: bool = False
    """Log-probs of the responses from the trainer, not the sampler (for bfloat16)."""
    clip_range: float = 0.2
    """Of the probability ratio around 1."""
    clip_range_high: float | None = None
    """Of the ratio above 1; None is clip_range (clip-higher: 0.28)."""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative, above 1; None is none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ptx_coef: float = 0.0
    """Weight of a language-model loss on texts mixed in (InstructGPT: 27.8)."""
    aggregation: losses.Aggregation = "token_mean"
    """Of token losses: the mean of all tokens; of responses' means; or responses' sums
    over a constant, alone without bias where responses differ in length."""
    loss_scale_factor: float | None = None
    """With aggregation constant: tokens that it divides a response's sum by; None is
    max_new_tokens, and 1 gives gradients the size of the objective's."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 1
    """Optimizer steps a pass."""
    micro_batch_size: int | None = None
    """Responses held at once in an update; None is a minibatch."""
    stop_approxkl: float | None = None
    """Nats per token from the sampler that end a batch's updates; None is off."""
    max_ratio_mean: float | None = None
    """A minibatch of a larger mean ratio is left out (TRL: 10); None is off."""

    def __post_init__(self) -> None:
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
        if self.slots is not None:
            checks.positive(slots=self.slots)
        one_of(aggregation=self.aggregation, among=get_args(losses.Aggregation))
        if self.loss_scale_factor is not None:
            aggregation.check_scale(
                self.aggregation, loss_scale_factor=self.loss_scale_factor
            )
        for name, given in {
            "truncate_after": self.truncate_after,
            "truncate_reward_only": self.truncate_reward_only,
        }.items():
            if given and not self.fixed_length:
                raise InputError(
                    f"{name}: expected fixed_length with it, got {given} without, "
                    f"where the sampler ends a response at its first stop token; set "
                    f"fixed_length, or leave it out"
                )


def one_of(*, among: tuple[Any, ...], **given: Any) -> None:
    """Raises InputError by name for a choice that is none of `among`."""
    for name, choice in given.items():
        if choice not in among:
            raise InputError(
                f"{name}: expected one of {', '.join(map(repr, among))}, got "
                f"{choice!r}; choose one"
            )
