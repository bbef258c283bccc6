"""Control of the KL coefficient β: constant, scheduled, or with a target for the KL.

`fixed`, `scheduled`, `adaptive`, `pi` and `lagrangian` make a controller from checked
numbers; `Control` makes one from the options of a command line. The last three keep the
KL near a target in nats per response or in nats per token, with β within
[`min_kl_coef`, `max_kl_coef`]. By default these are a tenth and ten times the β at the
start; the lower one of the Lagrangian is 0. `controllers` has the update rules.

The usual range of β is 0.02-0.1 reward units per nat.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.coefficients import fixed, require_covers, scheduled
from rlhf_jax.functional.kl.controllers import (
    AdaptiveKL,
    FixedKL,
    KLController,
    LagrangianKL,
    ProportionalIntegralKL,
    Schedule,
    ScheduledKL,
    Unit,
    scalar,
)
from rlhf_jax.functional.kl.target_coefficients import (
    RANGE,
    adaptive,
    known_unit,
    lagrangian,
    pi,
)

__all__ = [
    "CONSTANT",
    "RANGE",
    "AdaptiveKL",
    "Control",
    "FixedKL",
    "KLController",
    "LagrangianKL",
    "ProportionalIntegralKL",
    "Schedule",
    "ScheduledKL",
    "Unit",
    "adaptive",
    "fixed",
    "lagrangian",
    "pi",
    "require_covers",
    "scalar",
    "scheduled",
]

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Control:
    """The control of the KL coefficient; by default it is constant."""

    kind: Literal["fixed", "linear", "adaptive", "pi", "lagrangian"] = "fixed"
    """Rule of the coefficient: fixed keeps it constant, linear moves it to `end`, and
    adaptive, pi and lagrangian keep the KL at `target`."""
    target: float | None = None
    """Target of the KL, nats per `unit`, for adaptive, pi and lagrangian."""
    unit: Unit | None = None
    """Unit of the target: response is nats per response, token is nats per token."""
    horizon: int = 10_000
    """Horizon of adaptive: number of responses over which β changes by about a fifth at
    most."""
    proportional: float = 0.3
    """Proportional gain of pi: change of ln β for a relative error of 1."""
    integral: float = 0.05
    """Integral gain of pi: change of ln β per iteration for a relative error of 1."""
    max_error: float = 1.0
    """Largest relative error of the KL that pi reads; larger ones count as this."""
    learning_rate: float = 1e-3
    """Learning rate of lagrangian: change of β, reward units per nat, for each nat
    above the target."""
    min_kl_coef: float | None = None
    """Lower bound of β under a target, reward units per nat; None is a tenth of
    --kl-coef (lagrangian: 0)."""
    max_kl_coef: float | None = None
    """Upper bound of β under a target, reward units per nat; None is ten times
    --kl-coef."""
    end: float | None = None
    """Final β of linear, in the last iteration, reward units per nat."""

    def __post_init__(self) -> None:
        if self.kind not in _READ_BY:
            raise checks.InputError(
                f"kind: expected one of {', '.join(_READ_BY)}, got {self.kind!r}; "
                f"choose one"
            )
        read = _READ_BY[self.kind]
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            value = values[field.name]
            if field.name in ("kind", *read):
                if value is None and field.name not in _MAY_BE_NONE:
                    raise checks.InputError(
                        f"{field.name}: expected a number with kind {self.kind}, got "
                        f"none; give {field.name}"
                    )
            elif value != field.default:
                users = [
                    kind for kind, names in _READ_BY.items() if field.name in names
                ]
                raise checks.InputError(
                    f"{field.name}: expected none with kind {self.kind}, which does "
                    f"not read it, got {value}; leave it out, or choose kind "
                    f"{' or '.join(users)}"
                )
        checks.positive(
            horizon=self.horizon,
            integral=self.integral,
            max_error=self.max_error,
            learning_rate=self.learning_rate,
        )
        checks.non_negative(proportional=self.proportional)
        for name in ("end", "min_kl_coef", "max_kl_coef"):
            if values[name] is not None:
                checks.non_negative(**{name: values[name]})
        if self.target is not None:
            checks.positive(target=self.target)
            known_unit(self.unit, target=self.target)

    @property
    def target_per_response(self) -> float | None:
        """The target where its unit is the response, None otherwise."""
        return self.target if self.unit == "response" else None

    def controller(self, kl_coef: float, *, num_steps: int) -> KLController:
        """The controller of a run.

        Args:
          kl_coef: β at the start, reward units per nat.
          num_steps: iterations of the run.

        Returns:
          The controller, before the first iteration.

        Raises:
          InputError: kl_coef is negative, NaN or infinite, outside its bounds, or 0
            where it is multiplied.

        >>> print(Control().controller(0.05, num_steps=100).kl_coef)
        0.05
        >>> linear = Control(kind="linear", end=0.0).controller(0.1, num_steps=3)
        >>> print(linear.update(kl=None, num_episodes=64).kl_coef)
        0.05
        """
        match self.kind:
            case "fixed":
                return fixed(kl_coef)
            case "linear":
                assert self.end is not None  # checked above, as is every target
                checks.non_negative(kl_coef=kl_coef, end=self.end)
                line = _Line(start=kl_coef, end=self.end, num_steps=num_steps)
                return scheduled(line, num_steps=num_steps)
            case "adaptive":
                assert self.target is not None
                return adaptive(
                    kl_coef,
                    target=self.target,
                    unit=self.unit,
                    horizon=self.horizon,
                    min_kl_coef=self.min_kl_coef,
                    max_kl_coef=self.max_kl_coef,
                )
            case "pi":
                assert self.target is not None
                return pi(
                    kl_coef,
                    target=self.target,
                    unit=self.unit,
                    proportional=self.proportional,
                    integral=self.integral,
                    max_error=self.max_error,
                    min_kl_coef=self.min_kl_coef,
                    max_kl_coef=self.max_kl_coef,
                )
            case "lagrangian":
                assert self.target is not None
                return lagrangian(
                    kl_coef,
                    target=self.target,
                    unit=self.unit,
                    learning_rate=self.learning_rate,
                    min_kl_coef=self.min_kl_coef,
                    max_kl_coef=self.max_kl_coef,
                )


_OF_A_TARGET = ("target", "unit", "min_kl_coef", "max_kl_coef")
_MAY_BE_NONE = ("unit", "min_kl_coef", "max_kl_coef")  # checked or derived elsewhere
_READ_BY = {
    "fixed": (),
    "linear": ("end",),
    "adaptive": (*_OF_A_TARGET, "horizon"),
    "pi": (*_OF_A_TARGET, "proportional", "integral", "max_error"),
    "lagrangian": (*_OF_A_TARGET, "learning_rate"),
}
CONSTANT = Control()


@dataclasses.dataclass(frozen=True)
class _Line:
    """`start` at step 0, `end` at the last step; equal lines share one program."""

    start: float
    end: float
    num_steps: int

    def __call__(self, step: Array) -> Array:
        share = step.astype(jnp.float32) / max(self.num_steps - 1, 1)
        return self.start + share * (self.end - self.start)
