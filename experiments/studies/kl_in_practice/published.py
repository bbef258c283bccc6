"""Published statements about the choice of the KL, as claims of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from choices import NONE, cell

World = Literal["language", "arithmetic"]
BOTH: tuple[World, ...] = ("language", "arithmetic")


class Published(NamedTuple):
    """A claim, which holds if greater > factor · less - margin."""

    source: str
    says: str
    measure: str
    greater: str  # a choice; NONE is β = 0
    less: str
    factor: float = 1.0
    margin: float = 0.0  # in the unit of the measure
    worlds: tuple[World, ...] = BOTH


SHAH = "Shah et al. 2025, arXiv:2512.21852"
LIU = "Liu et al. 2025, arXiv:2510.01555"
PUBLISHED = (
    Published(
        source=SHAH,
        says="k1 in the reward, whose gradient is unbiased, does better than k3 in the "
        "loss",
        measure="gold",
        greater="k1 reward",
        less="k3 loss",
    ),
    Published(
        source=SHAH,
        says="k3 in the reward is worse than k1 there",
        measure="gold",
        greater="k1 reward",
        less="k3 reward",
    ),
    Published(
        source=LIU,
        says="k1 in the loss does not hold the policy, as k1 in the reward does",
        measure="kl",
        greater="k1 loss",
        less="k1 reward",
    ),
    Published(
        source=LIU,
        says="k2 in the loss is k1 in the reward: its KL is at most a quarter higher",
        measure="kl",
        greater="k1 reward",
        less="k2 loss",
        factor=0.8,
    ),
    Published(
        source=LIU,
        says="k2 in the loss is k1 in the reward: its KL is at most a quarter lower",
        measure="kl",
        greater="k2 loss",
        less="k1 reward",
        factor=0.8,
    ),
    Published(
        source=LIU,
        says="k3 in the loss, a first-order approximation, holds the policy less than "
        "k2",
        measure="kl",
        greater="k3 loss",
        less="k2 loss",
    ),
    Published(
        source="Shao et al. 2024, arXiv:2402.03300",
        says="k3 in the loss holds the policy to its reference",
        measure="kl",
        greater=NONE,
        less="k3 loss",
    ),
    Published(
        source="Yu et al. 2025, arXiv:2503.14476",
        says="with a verifier k3 in the loss is not needed: without it no less is "
        "learned",
        measure="gold",
        greater=NONE,
        less="k3 loss",
        margin=0.02,
        worlds=("arithmetic",),
    ),
    Published(
        source="Stiennon et al. 2020, arXiv:2009.01325",
        says="k1 in the reward keeps a policy from exploiting its reward model",
        measure="gold",
        greater="k1 reward",
        less=NONE,
        worlds=("language",),
    ),
    Published(
        source="Minka 2005, MSR-TR-2005-173",
        says="a forward KL keeps more entropy than a reverse one",
        measure="entropy",
        greater="k3 loss",
        less="k2 loss",
    ),
)


def claims_at(
    kl_coefs: Sequence[float], *, algorithms: Sequence[str], world: World
) -> dict[str, str]:
    """The claims of a sweep: every published claim, for each algorithm and β."""
    claims = {}
    for one in PUBLISHED:
        if world not in one.worlds:
            continue
        for algorithm in algorithms:
            for kl_coef in kl_coefs:
                greater, less = (
                    f"{one.measure}(algorithm={algorithm!r}, "
                    f"kl={(NONE if name == NONE else cell(name, kl_coef))!r})"
                    for name in (one.greater, one.less)
                )
                factor = "" if one.factor == 1 else f"{one.factor:g} * "
                margin = f" - {one.margin:g}" if one.margin else ""
                name = f"{one.says} ({one.source}; {algorithm}, β = {kl_coef:g})"
                claims[name] = f"{greater} > {factor}{less}{margin}"
    return claims
