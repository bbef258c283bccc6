"""Surrogates beside the clip: DPPO, GMPO, VESPO, TOPR, DAR and score centring.

`recipe.Surrogate` has them beside PPO's clip, CISPO and SAPO. Their formulas
(`functional.policy_losses`) are loaded where one is chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import get_args

from rlhf_jax.algorithms.policy_gradient.loss import Loss
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.functional.surrogates import Divergence


@dataclasses.dataclass(frozen=True)
class DPPO:
    """Tokens that moved too far, by a divergence and not by a ratio, are left out."""

    divergence: Divergence = "tv"
    """Divergence of the sampled token against all others: total variation, or KL."""
    threshold: float = 0.15
    """δ: the largest divergence where the advantage is negative, a probability (tv) or
    nats (kl: 0.05)."""
    threshold_high: float | None = None
    """δ where the advantage is positive; None is threshold."""
    cap: float = 20.0
    """Largest ratio, which is the weight of what is not left out."""

    def __post_init__(self) -> None:
        checks.one_of(divergence=self.divergence, among=get_args(Divergence))
        checks.positive(threshold=self.threshold, threshold_high=self.threshold_high)
        checks.within(above=1, advice="choose 10 or 20", cap=self.cap)

    @property
    def loss(self) -> Loss:
        """`policy_losses.dppo_loss`."""
        from rlhf_jax.functional import policy_losses

        high = self.threshold_high
        return functools.partial(
            policy_losses.dppo_loss,
            divergence=self.divergence,
            threshold=self.threshold,
            threshold_high=self.threshold if high is None else high,
            cap=self.cap,
        )


@dataclasses.dataclass(frozen=True)
class GMPO:
    """The geometric mean of a response's ratios, each of which is clipped first."""

    clip_range: float = 0.4
    """ε: log-ratios are at least −ε where the advantage is negative, nats."""
    clip_range_high: float | None = None
    """Log-ratios are at most this where it is positive, nats; None is clip_range."""

    def __post_init__(self) -> None:
        checks.positive(
            clip_range=self.clip_range, clip_range_high=self.clip_range_high
        )

    @property
    def loss(self) -> Loss:
        """`policy_losses.gmpo_loss`."""
        from rlhf_jax.functional import policy_losses

        high = self.clip_range_high
        return functools.partial(
            policy_losses.gmpo_loss,
            clip_range=self.clip_range,
            clip_range_high=self.clip_range if high is None else high,
        )


@dataclasses.dataclass(frozen=True)
class VESPO:
    """The ratio W of a response as a soft weight, W^power·exp(decay·(1 − W))."""

    power_pos: float = 2.0
    """Power of W where the advantage is positive."""
    decay_pos: float = 3.0
    """Decay in W where the advantage is positive."""
    power_neg: float = 3.0
    """Power of W where it is not."""
    decay_neg: float = 2.0
    """Decay in W where it is not."""

    def __post_init__(self) -> None:
        checks.positive(**vars(self))

    @property
    def loss(self) -> Loss:
        """`policy_losses.vespo_loss`."""
        from rlhf_jax.functional import policy_losses

        return functools.partial(
            policy_losses.vespo_loss,
            power=self.power_pos,
            decay=self.decay_pos,
            negative_power=self.power_neg,
            negative_decay=self.decay_neg,
        )


@dataclasses.dataclass(frozen=True)
class TOPR:
    """Weight 1 for better responses, the ratio up to 1 for worse ones."""

    @property
    def loss(self) -> Loss:
        """`policy_losses.topr_loss`."""
        from rlhf_jax.functional import policy_losses

        return policy_losses.topr_loss


@dataclasses.dataclass(frozen=True)
class DAR:
    """Regression onto a mixture of reference and sampler, tilted by the advantage."""

    beta: float = 0.05
    """β: reward units per nat of the KL to the mixture."""
    share: float = 0.1
    """α: share of the reference in the mixture, 0 to 1."""
    cap: float = 20.0
    """Largest weight of a response."""

    def __post_init__(self) -> None:
        checks.positive(beta=self.beta)
        checks.fraction(share=self.share)
        checks.within(above=1, advice="choose 20", cap=self.cap)

    @property
    def loss(self) -> Loss:
        """`policy_losses.dar_loss`."""
        from rlhf_jax.functional import policy_losses

        return functools.partial(policy_losses.dar_loss, **vars(self))


@dataclasses.dataclass(frozen=True)
class Centred:
    """A likelihood without the drift towards the sampler that its score has."""

    top_k: int = 128
    """Tokens whose probability the sampler records at each position."""
    cap: float | None = None
    """Largest ratio; None weights nothing."""
    floor: float | None = None
    """Smallest ratio: the weight is 0 below it, and above the cap; None has neither."""

    def __post_init__(self) -> None:
        checks.positive(top_k=self.top_k)
        if self.cap is None:
            expect_none(
                "without a cap", advice="give both, or neither", floor=self.floor
            )
            return
        from rlhf_jax.functional.off_policy import importance

        importance.check_bounds("token_mask", cap=self.cap, floor=self.floor)

    @property
    def loss(self) -> Loss:
        """`policy_losses.centred_loss`."""
        from rlhf_jax.functional import policy_losses

        return functools.partial(
            policy_losses.centred_loss, cap=self.cap, floor=self.floor
        )
