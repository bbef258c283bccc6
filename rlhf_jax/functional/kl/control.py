"""Ways for the KL coefficient β to move: fixed, scheduled, or holding a KL at a target.

Make a controller with `fixed`, `scheduled`, `adaptive`, `pi` or `lagrangian`, which
check what they are given, or, from the options of a command line, with `Control`. The
last three hold the KL at a target that is in nats per response or in nats per token.
What a controller does in an iteration stands in `controllers`. It keeps β within
[`min_kl_coef`, `max_kl_coef`]; by default these are a tenth and ten times the
coefficient that it starts at, and 0 below for the Lagrangian multiplier.

The usual range of β is 0.02-0.1 reward units per nat.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.coefficients import (
    RANGE,
    adaptive,
    fixed,
    known_unit,
    lagrangian,
    pi,
    require_covers,
    scheduled,
)
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
    """How the KL coefficient moves; by default it stays."""

    kind: Literal["fixed", "linear", "adaptive", "pi", "lagrangian"] = "fixed"
    """linear goes to `end`; the last three hold the KL at `target`."""
    target: float | None = None
    """Nats of KL to hold, per `unit`."""
    unit: Unit | None = None
    """Whether `target` is nats per response or per token."""
    horizon: int = 10_000
    """adaptive: responses over which the coefficient moves by a fifth at most."""
    proportional: float = 0.3
    """pi: change of the coefficient's logarithm for an error of 1."""
    integral: float = 0.05
    """pi: the same for each iteration that the error lasts."""
    max_error: float = 1.0
    """pi: relative error beyond which it pulls no harder."""
    learning_rate: float = 1e-3
    """lagrangian: reward units per nat for each nat of excess."""
    min_kl_coef: float | None = None
    """Smallest coefficient that a target may lead to, reward units per nat; None is a
    tenth of --kl-coef (lagrangian: 0)."""
    max_kl_coef: float | None = None
    """Largest coefficient that a target may lead to, reward units per nat; None is ten
    times --kl-coef."""
    end: float | None = None
    """linear: coefficient of the last iteration, reward units per nat."""

    def __post_init__(self) -> None:
        if self.kind not in _READ_BY:
            raise checks.InputError(
                f"kind: expected one of {', '.join(_READ_BY)}, got {self.kind!r}; "
                f"choose one"
            )
        read = _READ_BY[self.kind]
        given = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            value = given[field.name]
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
            if given[name] is not None:
                checks.non_negative(**{name: given[name]})
        if self.target is not None:
            checks.positive(target=self.target)
            known_unit(self.unit, target=self.target)

    @property
    def target_per_response(self) -> float | None:
        """The target where it is in nats per response, else None."""
        return self.target if self.unit == "response" else None

    def controller(self, kl_coef: float, *, num_steps: int) -> KLController:
        """The controller that starts at `kl_coef`, for a run of `num_steps` iterations.

        Raises:
          InputError: kl_coef is negative, NaN or infinite, outside its bounds, or 0
            where it is multiplied.
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
    """start at step 0, end at the last; equal lines share one program."""

    start: float
    end: float
    num_steps: int

    def __call__(self, step: Array) -> Array:
        share = step.astype(jnp.float32) / max(self.num_steps - 1, 1)
        return self.start + share * (self.end - self.start)
