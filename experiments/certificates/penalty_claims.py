"""Claims about the expected gradient of each penalty, for `gradients.certify`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from rlhf_jax.functional.kl.gradients import (
    FIXED_FORWARD,
    FIXED_REVERSE,
    FULL_FORWARD,
    FULL_REVERSE,
)
from rlhf_jax.functional.kl.penalty import Penalty

ZERO = "zero"
NONE = "none of these"
KLS = (FULL_REVERSE, FULL_FORWARD, FIXED_REVERSE, FIXED_FORWARD)
TOP_K = 2  # of the 4 tokens
MIXTURE = Penalty("k2", placement="loss", reference_share=0.4)
SAMPLED_TAIL = Penalty("exact", placement="loss", top_k=TOP_K, tail="sampled")


class Claim(NamedTuple):
    """A penalty and the expected gradient that it is claimed to have."""

    penalty: Penalty
    gradient: str | None = None  # one of KLS, ZERO or NONE; None: only `Penalty.terms`
    older: bool = False  # whether an older policy drew the samples


def _reverse(estimator: Any, placement: Any, per: Any, gradient: str) -> Claim:
    chosen = Penalty(value_estimator=estimator, placement=placement, per=per)
    return Claim(chosen, gradient)


def _weighted(
    direction: Any, estimator: Any, per: Any, weights: Any, gradient: str
) -> Claim:
    chosen = Penalty(
        value_estimator=estimator,
        placement="loss",
        direction=direction,
        per=per,
        importance_weights=weights,
    )
    # On its own samples the weights of a reverse KL would be 1.
    return Claim(chosen, gradient, older=direction == "reverse")


TABLE = (
    _reverse("k1", "reward", "token", FULL_REVERSE),
    _reverse("k1", "reward", "response", FULL_REVERSE),
    _reverse("k1", "loss", "token", ZERO),
    _reverse("k1", "loss", "response", ZERO),
    _reverse("k1", "both", "token", FULL_REVERSE),
    _reverse("k1", "both", "response", FULL_REVERSE),
    _reverse("k2", "reward", "token", NONE),
    _reverse("k2", "reward", "response", NONE),
    _reverse("k2", "loss", "token", FIXED_REVERSE),
    _reverse("k2", "loss", "response", FULL_REVERSE),
    _reverse("k2", "both", "token", NONE),
    _reverse("k2", "both", "response", NONE),
    _reverse("k3", "reward", "token", NONE),
    _reverse("k3", "reward", "response", NONE),
    _reverse("k3", "loss", "token", FIXED_FORWARD),
    _reverse("k3", "loss", "response", FULL_FORWARD),
    _reverse("k3", "both", "token", FULL_REVERSE),
    _reverse("k3", "both", "response", FULL_REVERSE),
    _reverse("exact", "reward", "token", NONE),
    _reverse("exact", "reward", "response", NONE),
    _reverse("exact", "loss", "token", FIXED_REVERSE),
    _reverse("exact", "loss", "response", FIXED_REVERSE),
    _reverse("exact", "both", "token", FULL_REVERSE),
    _reverse("exact", "both", "response", FULL_REVERSE),
)
"""Every estimator, placement and unit of a reverse KL, on-policy.

The rows with one placement are known from the literature. With both placements the two
parts add up to the gradient of the estimator's mean, which is the KL if the estimator
is unbiased."""

OTHERS = (
    # One estimator for the value, another for the gradient.
    Claim(
        Penalty(value_estimator="k1", grad_estimator="k2", placement="loss"),
        FIXED_REVERSE,
    ),
    Claim(
        Penalty(
            value_estimator="k3", grad_estimator="k2", placement="loss", per="response"
        ),
        FULL_REVERSE,
    ),
    Claim(Penalty(value_estimator="k1", grad_estimator="k2", placement="both"), NONE),
    # No placement, and each response's share divided by its length.
    Claim(Penalty(placement=None)),
    Claim(Penalty(per="length")),
    Claim(Penalty(value_estimator="k2", placement="loss", per="length")),
    # A forward KL, exact.
    Claim(Penalty(value_estimator="exact", direction="forward"), NONE),
    Claim(
        Penalty(value_estimator="exact", direction="forward", placement="loss"),
        FIXED_FORWARD,
    ),
    Claim(
        Penalty(value_estimator="exact", direction="forward", placement="both"), NONE
    ),
    # A forward KL from samples of the policy, weighted.
    _weighted("forward", "k1", "token", "token", FIXED_FORWARD),
    _weighted("forward", "k1", "token", "prefix", FULL_FORWARD),
    _weighted("forward", "k1", "response", "prefix", FULL_FORWARD),
    _weighted("forward", "k2", "token", "token", NONE),
    _weighted("forward", "k2", "token", "prefix", NONE),
    _weighted("forward", "k2", "response", "prefix", NONE),
    _weighted("forward", "k3", "token", "token", FIXED_FORWARD),
    _weighted("forward", "k3", "token", "prefix", FULL_FORWARD),
    _weighted("forward", "k3", "response", "prefix", FULL_FORWARD),
    # With weights, samples of an older policy have the gradient of on-policy samples.
    _weighted("reverse", "k1", "response", "prefix", ZERO),
    _weighted("reverse", "k2", "token", "prefix", FIXED_REVERSE),
    _weighted("reverse", "k2", "response", "prefix", FULL_REVERSE),
    _weighted("reverse", "k3", "token", "prefix", FIXED_FORWARD),
    _weighted("reverse", "k3", "response", "prefix", FULL_FORWARD),
    _weighted("reverse", "exact", "token", "prefix", FIXED_REVERSE),
    # The likeliest tokens, and one bucket for the rest.
    Claim(Penalty(value_estimator="exact", placement="reward", top_k=TOP_K)),
    Claim(Penalty(value_estimator="exact", placement="loss", top_k=TOP_K)),
    Claim(Penalty(value_estimator="exact", placement="both", top_k=TOP_K)),
    # To a mixture of the reference and the policy that sampled (DAR).
    Claim(Penalty(reference_share=0.4)),
    Claim(MIXTURE),
    Claim(
        dataclasses.replace(MIXTURE, per="response", importance_weights="prefix"),
        older=True,
    ),
    # The likeliest tokens, and the sampled token for the rest (EMA-PG).
    Claim(SAMPLED_TAIL, FIXED_REVERSE),
    Claim(
        dataclasses.replace(SAMPLED_TAIL, importance_weights="prefix"),
        FIXED_REVERSE,
        older=True,
    ),
)
"""Further claims; those without a named gradient are compared with `Penalty.terms`."""


# Relative to the largest entry of the expected gradient or, if that is larger, of the
# full reverse KL's: some expected gradients are 0 or a small difference. For a mean,
# relative to the KL.
TOLERANCE = 1e-5
APART = 1e-2  # on the same scale: least distance to every KL, for a claim of NONE


class Finding(NamedTuple):
    """The measurements of a claim."""

    claim: Claim
    temperature: float
    stops: bool  # whether a token ends responses, so that they differ in length
    error: float  # max|measured - expected|, on the scale of `TOLERANCE`
    nearest: float  # the same distance to the nearest of KLS and ZERO
    value: float  # mean of the value estimator, nats per response; NaN if unused
    bias: float  # value - KL(π ‖ π_ref), nats; NaN if it estimates something else
    value_error: float  # |value - its expectation| / KL; NaN where `bias` is

    @property
    def holds(self) -> bool:
        """Whether gradient and value are as claimed.

        A gradient that is not a KL's is far from each of them, and the library warns.
        """
        named = self.claim.gradient
        warned = self.claim.penalty.warning is not None
        return (
            self.error <= TOLERANCE
            and not self.value_error > TOLERANCE
            and (named != NONE or self.nearest >= APART)
            and (named is None or warned == (named not in KLS))
        )

    @property
    def estimator(self) -> str:
        """A description of the estimator."""
        chosen = self.claim.penalty
        words = [chosen.value_estimator]
        if chosen.grad_estimator is not None:
            words.append(f"gradient {chosen.grad_estimator}")
        if chosen.top_k is not None:
            words.append(f"top {chosen.top_k}")
        if chosen.tail == "sampled":
            words.append("sampled tail")
        if chosen.reference_share is not None:
            words.append(f"{chosen.reference_share:g} of the reference")
        if chosen.direction == "forward":
            words.append("forward")
        if chosen.importance_weights is not None:
            words.append(f"{chosen.importance_weights} weights")
        if self.claim.older:
            words.append("older samples")
        return ", ".join(words)

    @property
    def place(self) -> str:
        """The placement, and the unit of one estimate."""
        return f"{self.claim.penalty.placement or 'neither'}, {self.claim.penalty.per}"

    @property
    def lengths(self) -> str:
        """Lengths of the responses, tokens."""
        return "1 to 4" if self.stops else "4"
