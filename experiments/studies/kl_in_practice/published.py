"""What the field has published about the choice of the KL, as claims of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from choices import NONE, cell


class Published(NamedTuple):
    """A claim, and the comparison that would bear it out."""

    source: str
    says: str
    measure: str
    greater: str  # a choice; NONE is β = 0
    less: str


PUBLISHED = (
    Published(
        "Shah et al. 2025, arXiv:2512.21852",
        "k1 in the reward, whose gradient is unbiased, does better than k3 in the loss",
        *("gold", "k1 reward", "k3 loss"),
    ),
    Published(
        "Shah et al. 2025, arXiv:2512.21852",
        "k3 in the reward is worse than k1 there",
        *("gold", "k1 reward", "k3 reward"),
    ),
    Published(
        "Liu et al. 2025, arXiv:2510.01555",
        "k1 in the loss does not hold the policy, as k1 in the reward does",
        *("kl", "k1 loss", "k1 reward"),
    ),
    Published(
        "Liu et al. 2025, arXiv:2510.01555",
        "k2 in the loss is k1 in the reward: the KL is not higher with it",
        *("kl", "k2 loss", "k1 reward"),
    ),
    Published(
        "Liu et al. 2025, arXiv:2510.01555",
        "k2 in the loss is k1 in the reward: the KL is not lower with it",
        *("kl", "k1 reward", "k2 loss"),
    ),
    Published(
        "Liu et al. 2025, arXiv:2510.01555",
        "k3 in the loss, a first-order approximation, holds the policy less than k2",
        *("kl", "k3 loss", "k2 loss"),
    ),
    Published(
        "Shao et al. 2024, arXiv:2402.03300",
        "k3 in the loss holds the policy to its reference",
        *("kl", NONE, "k3 loss"),
    ),
    Published(
        "Yu et al. 2025, arXiv:2503.14476",
        "without a KL penalty a policy comes further",
        *("gold", NONE, "k1 reward"),
    ),
    Published(
        "Stiennon et al. 2020, arXiv:2009.01325",
        "the KL penalty keeps a policy from exploiting its reward model",
        *("gold", "k1 reward", NONE),
    ),
    Published(
        "Minka 2005, MSR-TR-2005-173",
        "a forward KL keeps more entropy than a reverse one",
        *("entropy", "k3 loss", "k2 loss"),
    ),
)


def claims_at(
    kl_coefs: Sequence[float], *, algorithms: Sequence[str]
) -> dict[str, str]:
    """The claims of a sweep: each published one, of each algorithm at each β."""
    claims = {}
    for one in PUBLISHED:
        for algorithm in algorithms:
            for kl_coef in kl_coefs:
                greater, less = (
                    f"{one.measure}(algorithm={algorithm!r}, "
                    f"kl={(NONE if name == NONE else cell(name, kl_coef))!r})"
                    for name in (one.greater, one.less)
                )
                name = f"{one.says} ({one.source}; {algorithm}, β = {kl_coef:g})"
                claims[name] = f"{greater} > {less}"
    return claims
