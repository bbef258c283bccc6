"""The surrogate of a policy gradient: `Clip`, `CISPO` or `SAPO`, with its own options.

Each is static, and its `loss` is a function of `functional.losses` with the options
filled in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax

from rlhf_jax.functional import checks, losses, masked
from rlhf_jax.functional.losses import RatioLevel

WeightLevel = Literal["token", "sequence"]
# Of log-probs, advantages and a mask, by keyword: the loss, and its stats.
Loss = Callable[..., tuple[jax.Array, masked.Stats]]


@dataclasses.dataclass(frozen=True)
class Clip:
    """PPO's, whose gradient is 0 where the ratio is beyond the clip."""

    clip_range: float = 0.2
    """ε: probability ratios are clipped to [1 − ε, 1 + ε]."""
    clip_range_high: float | None = None
    """Clip range above 1; None is clip_range (clip-higher: 0.28)."""
    dual_clip: float | None = None
    """Dual-clip bound c > 1 of ratios where the advantage is negative; None disables
    it."""
    ratio_level: RatioLevel = "token"
    """Whose ratio a token has (`ratios.at_level`)."""

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
        return functools.partial(
            losses.policy_loss,
            clip_range=self.clip_range,
            clip_range_high=self.clip_range_high,
            dual_clip=self.dual_clip,
            ratio_level=self.ratio_level,
        )


@dataclasses.dataclass(frozen=True)
class CISPO:
    """The ratio as a bounded weight of log-probs: every token keeps its gradient."""

    clip_range: float = 0.2
    """ε: weights are at least 1 − ε; 1 or more is no lower bound."""
    clip_range_high: float | None = None
    """Weights are at most 1 + this; None is clip_range."""
    ratio_level: WeightLevel = "token"
    """Whose ratio a token has; of a sequence there is one level, as the weight has no
    gradient."""

    def __post_init__(self) -> None:
        checks.positive(
            clip_range=self.clip_range, clip_range_high=self.clip_range_high
        )
        checks.one_of(ratio_level=self.ratio_level, among=get_args(WeightLevel))

    @property
    def loss(self) -> Loss:
        """`losses.cispo_loss`."""
        high = self.clip_range_high
        return functools.partial(
            losses.cispo_loss,
            clip_range=self.clip_range,
            clip_range_high=self.clip_range if high is None else high,
            ratio_level=self.ratio_level,
        )


@dataclasses.dataclass(frozen=True)
class SAPO:
    """A soft gate in place of the clip."""

    temperature_pos: float = 1.0
    """Temperature of the gate where the advantage is positive."""
    temperature_neg: float = 1.05
    """Temperature of the gate where it is not."""
    ratio_level: RatioLevel = "token"
    """Whose ratio a token has (`ratios.at_level`)."""

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


Surrogate = Clip | CISPO | SAPO
CLIP = Clip()
