"""Options that few recipes choose, whose formulas are imported only then.

These are surrogates other than PPO's clip, CISPO and SAPO (`functional.policy_losses`),
the choice of tokens, the control of the entropy bonus, and the penalty on the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, get_args

from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.functional.surrogates import BinaryDivergence

if TYPE_CHECKING:  # which imports this module
    from rlhf_jax.algorithms.policy_gradient.loss import Loss


@dataclasses.dataclass(frozen=True)
class DPPO:
    """Leaves out tokens that moved too far, by a divergence instead of a ratio."""

    divergence: BinaryDivergence = "tv"
    """Divergence over the sampled token and all others: tv (total variation) or kl."""
    threshold: float = 0.15
    """δ: largest divergence where the advantage is negative, a probability (tv) or nats
    (kl: 0.05)."""
    threshold_high: float | None = None
    """Largest divergence where the advantage is positive; None is threshold."""
    cap: float = 20.0
    """Largest weight of a token; the weight is its ratio."""

    def __post_init__(self) -> None:
        checks.one_of(divergence=self.divergence, among=get_args(BinaryDivergence))
        checks.positive(threshold=self.threshold, threshold_high=self.threshold_high)
        checks.within(above=1, advice="choose 10 or 20", cap=self.cap)

    @property
    def loss(self) -> Loss:
        """`policy_losses.dppo_loss`."""
        from rlhf_jax.functional import policy_losses

        return functools.partial(policy_losses.dppo_loss, **vars(self))


@dataclasses.dataclass(frozen=True)
class GMPO:
    """The geometric mean of a response's ratios, each of which is clipped first."""

    clip_range: float = 0.4
    """ε, nats: log-ratios are at least −ε where the advantage is negative."""
    clip_range_high: float | None = None
    """ε_high, nats: log-ratios are at most ε_high where the advantage is positive; None
    is clip_range."""

    def __post_init__(self) -> None:
        checks.positive(
            clip_range=self.clip_range, clip_range_high=self.clip_range_high
        )

    @property
    def loss(self) -> Loss:
        """`policy_losses.gmpo_loss`."""
        from rlhf_jax.functional import policy_losses

        return functools.partial(policy_losses.gmpo_loss, **vars(self))


@dataclasses.dataclass(frozen=True)
class VESPO:
    """Weights a response with ratio W softly, by W^power·exp(decay·(1 − W))."""

    power_pos: float = 2.0
    """Power of W where the advantage is positive."""
    decay_pos: float = 3.0
    """Decay in W where the advantage is positive."""
    power_neg: float = 3.0
    """Power of W where the advantage is not positive."""
    decay_neg: float = 2.0
    """Decay in W where the advantage is not positive."""

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
    """Weights worse responses by their ratio up to 1, better ones by 1."""

    @property
    def loss(self) -> Loss:
        """`policy_losses.topr_loss`."""
        from rlhf_jax.functional import policy_losses

        return policy_losses.topr_loss


@dataclasses.dataclass(frozen=True)
class DAR:
    """Regression onto a mixture of reference and sampler, tilted by the advantage."""

    beta: float = 0.05
    """β: KL coefficient of the mixture, reward units per nat."""
    share: float = 0.1
    """α: share of the reference in the mixture, from 0 to 1."""
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
    """Score centring: a policy gradient without the drift towards its sampler."""

    top_k: int = 128
    """Number of tokens whose probabilities the sampler records at each position."""
    cap: float | None = None
    """Largest weight, which is the ratio up to cap; None weights all tokens by 1."""
    floor: float | None = None
    """Smallest ratio: weights are 0 below it and above cap; None is no bound."""

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


@dataclasses.dataclass(frozen=True)
class EntropyTarget:
    """The coefficient grows while the entropy is at most the target, else shrinks."""

    target: float = 0.2
    """Entropy at or below which there is a bonus, nats per token."""
    increment: float = 0.005
    """Change of the coefficient in each iteration, reward units per nat."""
    largest: float = 1.0
    """Upper bound of the coefficient, reward units per nat."""

    def __post_init__(self) -> None:
        checks.positive(**vars(self))


@dataclasses.dataclass(frozen=True)
class GradientPenalty:
    """Adds γ/2·‖∇L‖² to the loss L of a minibatch, by a finite difference."""

    strength: float
    """γ: weight of half the squared norm of the gradient."""
    step: float = 1e-3
    """ε: step of the finite difference along the gradient; take a larger one where a
    forward pass in bfloat16 would round it away."""
    max_norm: float | None = 10.0
    """Largest norm of each of the two gradients; None clips neither."""

    def __post_init__(self) -> None:
        checks.positive(strength=self.strength, step=self.step, max_norm=self.max_norm)


@dataclasses.dataclass(frozen=True)
class TopEntropy:
    """Trains only on the share of tokens with the largest entropies."""

    share: float = 0.2
    """Share of the tokens that are trained on."""

    def __post_init__(self) -> None:
        _check_share(self.share)


@dataclasses.dataclass(frozen=True)
class ClipCov:
    """Tokens with a large covariance of log-prob and advantage have no gradient."""

    share: float = 2e-4
    """Largest share of the tokens that are left out, drawn among those within the
    bounds."""
    low: float = 1.0
    """Tokens with a covariance above this may be left out."""
    high: float = 5.0
    """Tokens with a covariance of this or more are not left out."""

    def __post_init__(self) -> None:
        _check_share(self.share)
        checks.finite(low=self.low)
        checks.within(above=self.low, advice="choose a larger one", high=self.high)


@dataclasses.dataclass(frozen=True)
class KLCov:
    """Penalises |log π − log π_old| of the tokens with the largest covariances."""

    share: float = 2e-3
    """Share of the tokens with the penalty."""
    coef: float = 1.0
    """Weight of |log π − log π_old|, reward units per nat."""

    def __post_init__(self) -> None:
        _check_share(self.share)
        checks.positive(coef=self.coef)


TokenChoice = TopEntropy | ClipCov | KLCov


def _check_share(share: float) -> None:
    checks.positive(share=share)
    checks.fraction(share=share)
