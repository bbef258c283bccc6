"""`kl`: the coefficient of the KL penalty, and how it changes.

The estimator and the place of the penalty belong to the method's recipe.
"""

from __future__ import annotations

import dataclasses

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.control import Control, Fixed

ControlOption = Control


@dataclasses.dataclass(frozen=True, kw_only=True)
class KL:
    """The KL coefficient β and its control."""

    kl_coef: float | None = None
    """KL coefficient β, reward units per nat. At 0 the KL is still measured. None is
    0.05 with a reference (0.1 in online-dpo, 1 in distill), and 0 without."""
    kl_control: ControlOption = Fixed()
    """How β changes during the run: fixed; linear,end=E; or adaptive, pi and
    lagrangian, which keep the KL at target=T nats per unit=response|token."""

    def __post_init__(self) -> None:
        if self.kl_coef is not None:
            checks.non_negative(kl_coef=self.kl_coef)
