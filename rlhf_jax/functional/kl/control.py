"""Control of the KL coefficient β: constant, scheduled, or with a target for the KL.

`Control` is one of `Fixed`, `Linear`, `Adaptive`, `PI` and `Lagrangian`, each with its
own options. Its method `controller` makes the controller of a run before the first
iteration, from `kl_coef`, β at the start in reward units per nat (above 0 where the
rule multiplies β, and within the bounds), and `num_steps`, the iterations of the run,
which only `Linear` reads. `fixed` makes a controller from a number, `scheduled` from a
function. `controllers` has the update rules.

The usual range of β is 0.02-0.1 reward units per nat.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rlhf_jax.functional import checks
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
    "PI",
    "Adaptive",
    "AdaptiveKL",
    "Control",
    "Fixed",
    "FixedKL",
    "KLController",
    "Lagrangian",
    "LagrangianKL",
    "Linear",
    "ProportionalIntegralKL",
    "Schedule",
    "ScheduledKL",
    "Unit",
    "fixed",
    "scalar",
    "scheduled",
]

Array = jax.Array

_RANGE = 10.0  # the default bounds of β are its start times and divided by this


@dataclasses.dataclass(frozen=True)
class Fixed:
    """β is constant."""

    target_per_response: ClassVar[None] = None  # no target

    def controller(
        self, kl_coef: checks.Scalar, *, num_steps: int | None = None
    ) -> FixedKL:
        """The controller, `fixed(kl_coef)`.

        >>> constant = Fixed().controller(0.05)
        >>> print(constant.kl_coef)
        0.05
        >>> print(constant.update(kl=scalar(9.0), num_episodes=64).kl_coef)
        0.05
        """
        del num_steps
        return fixed(kl_coef)


@dataclasses.dataclass(frozen=True)
class Linear:
    """β moves linearly to `end`."""

    end: float
    """Final β, in the last iteration, reward units per nat."""

    target_per_response: ClassVar[None] = None  # no target

    def controller(self, kl_coef: checks.Scalar, *, num_steps: int) -> ScheduledKL:
        """The controller, before the first iteration.

        >>> linear = Linear(end=0.0).controller(0.1, num_steps=3)
        >>> print(linear.kl_coef)
        0.1
        >>> print(linear.update(kl=None, num_episodes=64).kl_coef)
        0.05
        """
        checks.non_negative(kl_coef=kl_coef, end=self.end)
        line = _Line(start=kl_coef, end=self.end, num_steps=num_steps)
        return scheduled(line, num_steps=num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Target:
    """β moves to keep the KL at a target, within bounds."""

    target: float
    """Target of the KL, nats per `unit`."""
    unit: Unit
    """Unit of the target: response is nats per response, token is nats per token."""
    min_kl_coef: float | None = None
    """Lower bound of β, reward units per nat; None is a tenth of its start."""
    max_kl_coef: float | None = None
    """Upper bound of β, reward units per nat; None is ten times its start."""

    @property
    def target_per_response(self) -> float | None:
        """The target where its unit is the response, None otherwise."""
        return self.target if self.unit == "response" else None

    def _fields(self, kl_coef: checks.Scalar, *, multiplied: bool) -> dict[str, Any]:
        """Checks and returns the fields that all records with a target share.

        Arrays are not checked: runs may be mapped over their coefficient.
        """
        check = checks.positive if multiplied else checks.non_negative
        check(kl_coef=kl_coef)
        checks.positive(target=self.target)
        if self.unit not in get_args(Unit):
            raise checks.InputError(
                f"target: expected a unit with the target of {self.target:g} nats, got "
                f"unit={self.unit!r}; say unit='response' (nats per response) or "
                f"'token'"
            )
        lower, upper = self.min_kl_coef, self.max_kl_coef
        if lower is None:
            lower = kl_coef / _RANGE if multiplied else 0.0
        check(min_kl_coef=lower)
        if upper is None:
            upper = kl_coef * _RANGE
            if checks.number(upper) == 0:
                raise checks.InputError(
                    f"max_kl_coef: expected a number above 0, got None with kl_coef "
                    f"{kl_coef:g}, for which the default of {_RANGE:g} times kl_coef "
                    f"is 0; give max_kl_coef"
                )
        checks.positive(max_kl_coef=upper)
        checks.within(
            least=checks.number(lower),
            most=checks.number(upper),
            advice="start within min_kl_coef and max_kl_coef, or move them",
            kl_coef=kl_coef,
        )
        return {
            "kl_coef": scalar(kl_coef),
            "min_kl_coef": scalar(lower),
            "max_kl_coef": scalar(upper),
            "target": self.target,
            "unit": self.unit,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(_Target):
    """β is multiplied by a factor within 1 ± 0.2·n/horizon per n responses.

    openai/lm-human-preferences starts at β = 0.15 reward units per nat, with a target
    of 6 nats per response and a horizon of 10000 responses.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    horizon: int = 10_000
    """Number of responses over which β changes by about a fifth at most."""

    def controller(
        self, kl_coef: checks.Scalar, *, num_steps: int | None = None
    ) -> AdaptiveKL:
        """The controller, before the first iteration.

        >>> six = Adaptive(target=6.0, unit="response", horizon=1000)
        >>> controller = six.controller(0.1)
        >>> print(controller.min_kl_coef, controller.max_kl_coef)
        0.01 1.0
        >>> six.controller(0.0)
        Traceback (most recent call last):
            ...
        rlhf_jax.functional.errors.InputError: kl_coef: expected a finite number
            above 0, got 0.0; choose kl_coef > 0
        """
        del num_steps
        checks.positive(horizon=self.horizon)
        fields = self._fields(kl_coef, multiplied=True)
        return AdaptiveKL(**fields, horizon=self.horizon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PI(_Target):
    """A proportional-integral controller moves log β.

    With the default bounds β returns from either bound to its start within
    (log 10 - 2 kp)/ki updates with an error of 1: 35 for a kp of 0.3 and a ki of 0.05.
    """

    proportional: float = 0.3
    """Proportional gain kp: change of log β for a relative error of 1, which damps
    oscillations; 0 disables it."""
    integral: float = 0.05
    """Integral gain ki: change of log β per iteration for a relative error of 1, which
    brings the error to 0."""
    max_error: float = 1.0
    """Bound of the relative error of the KL: errors are clipped to ± this. An error of
    1 is a KL of twice the target, an error of -1 a KL of 0."""

    def controller(
        self, kl_coef: checks.Scalar, *, num_steps: int | None = None
    ) -> ProportionalIntegralKL:
        """The controller, before the first iteration.

        >>> controller = PI(target=0.05, unit="token").controller(0.1)
        >>> print(controller.kl_coef, controller.target, controller.unit)
        0.1 0.05 token
        >>> print(controller.proportional, controller.integral, controller.max_error)
        0.3 0.05 1.0
        """
        del num_steps
        checks.positive(integral=self.integral, max_error=self.max_error)
        checks.non_negative(proportional=self.proportional)
        return ProportionalIntegralKL(
            **self._fields(kl_coef, multiplied=True),
            error=scalar(0.0),
            proportional=self.proportional,
            integral=self.integral,
            max_error=self.max_error,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lagrangian(_Target):
    """β is the Lagrange multiplier of the constraint KL <= target."""

    min_kl_coef: float | None = None
    """Lower bound of β, reward units per nat; None is 0."""
    learning_rate: float = 1e-3
    """Learning rate η: change of β, reward units per nat, for each nat (per unit) above
    the target."""

    def controller(
        self, kl_coef: checks.Scalar, *, num_steps: int | None = None
    ) -> LagrangianKL:
        """The controller; kl_coef may be 0, but then max_kl_coef has no default.

        >>> controller = Lagrangian(target=6.0, unit="response").controller(0.1)
        >>> print(controller.min_kl_coef, controller.max_kl_coef)
        0.0 1.0
        >>> six = Lagrangian(target=6.0, unit="response", max_kl_coef=1.0)
        >>> print(six.controller(0.0).kl_coef)
        0.0
        """
        del num_steps
        checks.positive(learning_rate=self.learning_rate)
        fields = self._fields(kl_coef, multiplied=False)
        return LagrangianKL(**fields, learning_rate=self.learning_rate)


Control = Fixed | Linear | Adaptive | PI | Lagrangian
CONSTANT = Fixed()


def fixed(kl_coef: checks.Scalar) -> FixedKL:
    """A constant coefficient.

    Args:
      kl_coef: β, reward units per nat; 0.0 is no penalty. An array is not checked.

    >>> print(fixed(0.05).kl_coef)
    0.05
    >>> fixed(-0.05)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: kl_coef: expected a finite number, 0
        or more, got -0.05; choose kl_coef >= 0
    """
    checks.non_negative(kl_coef=kl_coef)
    return FixedKL(kl_coef=scalar(kl_coef))


def scheduled(schedule: Schedule, *, num_steps: int) -> ScheduledKL:
    """A coefficient that is a function of the iteration.

    Args:
      schedule: i32[] -> f32[], iteration to reward units per nat. Cached programs
        compare it by identity, so build it once.
      num_steps: iterations of the run. The schedule is evaluated and checked at each.

    Raises:
      ValueError: the schedule does not return a scalar. InputError: it returns a number
      that is negative, NaN or infinite; the message names the step.

    >>> controller = scheduled(lambda step: 0.4 * 0.5**step, num_steps=3)
    >>> print(controller.kl_coef)
    0.4
    >>> scheduled(lambda step: 0.5 - step, num_steps=3)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: schedule(1): expected a finite number,
        0 or more, got -0.5; choose schedule(1) >= 0
    """
    checks.positive(num_steps=num_steps)
    with jax.ensure_compile_time_eval():  # also where `jax.eval_shape` builds a run
        first = jnp.asarray(schedule(jnp.zeros((), jnp.int32)), jnp.float32)
        checks.shape((), **{"schedule(0)": first})
        steps = jnp.arange(num_steps, dtype=jnp.int32)
        kl_coefs = jax.vmap(lambda step: scalar(schedule(step)))(steps)
    if not isinstance(kl_coefs, Tracer):  # a traced β cannot be checked
        for step, kl_coef in enumerate(np.asarray(kl_coefs)):
            checks.non_negative(**{f"schedule({step})": kl_coef})
    return ScheduledKL(
        kl_coef=scalar(first),
        step=jnp.zeros((), jnp.int32),
        schedule=schedule,
        num_steps=num_steps,
    )


@dataclasses.dataclass(frozen=True)
class _Line:
    """`start` at step 0, `end` at the last step; equal lines share one program."""

    start: checks.Scalar
    end: checks.Scalar
    num_steps: int

    def __call__(self, step: Array) -> Array:
        share = step.astype(jnp.float32) / max(self.num_steps - 1, 1)
        return self.start + share * (self.end - self.start)
