"""References beside the first one, each with a name, a weight and a KL of its own.

    J(π) = E[r] - β·(KL(π ‖ π_ref) + Σ_i w_i·KL(π ‖ π_i))
    π*   ∝ (π_ref·Π_i π_i^{w_i})^{1/W}·exp(r/(β·W)),  W = 1 + Σ_i w_i

The first reference is the one whose weight is 1: lifecycles move it, controllers of β
read its KL, and weight drift is measured to it. The others stay what they were.

Source: Aminian et al. 2025, arXiv:2502.01203, section 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import flax.struct
import jax

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
TAKEN = ("k3", "coef", "exact")  # objective/kl_NAME is another metric there


@flax.struct.dataclass
class Further:
    """One reference beside the first, as programs take it: {name: Further}."""

    frozen: Frozen | None  # None where its log-probs are at hand and suffice
    logprobs: Array | None = None  # f32[B, S], nats; None computes them
    weight: float = flax.struct.field(pytree_node=False, default=1.0)
    """w, dimensionless: its KL coefficient is w·β. At 0 its KL is only measured."""


References = Mapping[str, Further]


def check(name: str, *, weight: float) -> None:
    """Raises InputError for a name or a weight that a reference cannot have."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in TAKEN:
        raise InputError(
            f"expected a name of letters, digits, _, - and ., and none of "
            f"{', '.join(TAKEN)}, which name other metrics objective/kl_NAME, got "
            f"{name!r}; choose another"
        )
    checks.within(
        least=0,
        advice="a negative one would push the policy away from the reference without "
        "bound, and 0 measures its KL alone",
        **{f"weight of reference {name}": weight},
    )
