"""Controllers of the KL coefficient β, made from numbers that are checked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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

RANGE = 10.0  # default bounds of β over, and under, the coefficient it starts at


def fixed(kl_coef: float) -> FixedKL:
    """A coefficient that stays, reward units per nat; 0.0 is no penalty.

    Raises:
      ValueError: kl_coef is negative, NaN or infinite.
    """
    checks.non_negative(kl_coef=kl_coef)
    return FixedKL(kl_coef=scalar(kl_coef))


def scheduled(schedule: Schedule, *, num_steps: int) -> ScheduledKL:
    """A coefficient that follows `schedule`, iteration -> reward units per nat.

    Args:
      schedule: i32[] -> f32[]; compared by identity when programs are cached, so build
        it once.
      num_steps: iterations of the run; each is read here.

    Raises:
      ValueError: the schedule does not give one number, or gives one that is negative,
      NaN or infinite; names the step.
    """
    checks.positive(num_steps=num_steps)
    first = scalar(schedule(jnp.zeros((), jnp.int32)))
    checks.shape((), **{"schedule(0)": first})
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    for step, kl_coef in enumerate(
        np.asarray(jax.lax.map(lambda step: scalar(schedule(step)), steps))
    ):
        checks.non_negative(**{f"schedule({step})": float(kl_coef)})
    return ScheduledKL(
        kl_coef=first,
        step=jnp.zeros((), jnp.int32),
        schedule=schedule,
        num_steps=num_steps,
    )


def adaptive(
    kl_coef: float,
    *,
    target: float,
    unit: Unit | None = None,
    horizon: int,
    min_kl_coef: float | None = None,
    max_kl_coef: float | None = None,
) -> AdaptiveKL:
    """A coefficient that starts at `kl_coef` and holds the KL at `target`.

    OAI: 0.15 reward units per nat, 6 nats per response, 10000 episodes.

    Args:
      kl_coef: reward units per nat, above 0: it is multiplied.
      target: nats per `unit`.
      unit: of the target.
      horizon: episodes; over as many, β moves by a fifth or so at most.
      min_kl_coef: smallest β, reward units per nat, above 0; None is kl_coef / 10.
      max_kl_coef: largest β, reward units per nat; None is 10 kl_coef.

    Raises:
      ValueError: an argument is not positive and finite, there is no unit, or kl_coef
      is outside the bounds.
    """
    checks.positive(kl_coef=kl_coef, target=target, horizon=horizon)
    lower, upper = _bounds(kl_coef, min_kl_coef, max_kl_coef)
    checks.positive(min_kl_coef=lower)
    return AdaptiveKL(
        kl_coef=scalar(kl_coef),
        min_kl_coef=scalar(lower),
        max_kl_coef=scalar(upper),
        target=target,
        unit=known_unit(unit, target=target),
        horizon=horizon,
    )


def pi(
    kl_coef: float,
    *,
    target: float,
    unit: Unit | None = None,
    proportional: float,
    integral: float,
    max_error: float = 1.0,
    min_kl_coef: float | None = None,
    max_kl_coef: float | None = None,
) -> ProportionalIntegralKL:
    """A coefficient that starts at `kl_coef` and holds the KL at `target`.

    With the default bounds β comes back from either of them to where it started within
    (log 10 - 2 kp)/ki updates of an error of 1: 35 for a kp of 0.3 and a ki of 0.05.

    Args:
      kl_coef: reward units per nat, above 0: it is multiplied.
      target: nats per `unit`.
      unit: of the target.
      proportional: kp, change of log β for an error of 1; it damps. 0 is off.
      integral: ki, change of log β an update for an error of 1; it brings the error
        to 0.
      max_error: error beyond which the controller pulls no harder; 1 is a KL of 0
        below the target, and of twice the target above it.
      min_kl_coef: smallest β, reward units per nat, above 0; None is kl_coef / 10.
      max_kl_coef: largest β, reward units per nat; None is 10 kl_coef.

    Raises:
      ValueError: proportional is negative, another number is not positive and finite,
      there is no unit, or kl_coef is outside the bounds.
    """
    checks.positive(
        kl_coef=kl_coef, target=target, integral=integral, max_error=max_error
    )
    checks.non_negative(proportional=proportional)
    lower, upper = _bounds(kl_coef, min_kl_coef, max_kl_coef)
    checks.positive(min_kl_coef=lower)
    return ProportionalIntegralKL(
        kl_coef=scalar(kl_coef),
        min_kl_coef=scalar(lower),
        max_kl_coef=scalar(upper),
        error=scalar(0.0),
        target=target,
        unit=known_unit(unit, target=target),
        proportional=proportional,
        integral=integral,
        max_error=max_error,
    )


def lagrangian(
    kl_coef: float,
    *,
    target: float,
    unit: Unit | None = None,
    learning_rate: float,
    min_kl_coef: float | None = None,
    max_kl_coef: float | None = None,
) -> LagrangianKL:
    """A coefficient that starts at `kl_coef` and holds the KL at or below `target`.

    Args:
      kl_coef: reward units per nat, 0 or more: it is added to.
      target: nats per `unit`.
      unit: of the target.
      learning_rate: η, reward units per nat for each nat (per unit) of excess.
      min_kl_coef: smallest β, reward units per nat; None is 0.
      max_kl_coef: largest β, reward units per nat; None is 10 kl_coef, which must then
        be above 0.

    Raises:
      ValueError: kl_coef is negative, another number is not positive and finite,
      there is no unit, or kl_coef is outside the bounds.
    """
    checks.non_negative(kl_coef=kl_coef)
    checks.positive(target=target, learning_rate=learning_rate)
    lower = 0.0 if min_kl_coef is None else min_kl_coef
    lower, upper = _bounds(kl_coef, lower, max_kl_coef)
    return LagrangianKL(
        kl_coef=scalar(kl_coef),
        min_kl_coef=scalar(lower),
        max_kl_coef=scalar(upper),
        target=target,
        unit=known_unit(unit, target=target),
        learning_rate=learning_rate,
    )


def require_covers(controller: KLController, *, num_steps: int) -> None:
    """InputError if a schedule has fewer steps than the run's `num_steps`."""
    if isinstance(controller, ScheduledKL) and controller.num_steps < num_steps:
        raise checks.InputError(
            f"the schedule of kl_coef: expected the {num_steps} steps of the run, got "
            f"{controller.num_steps}; make it with num_steps={num_steps}, or run fewer"
        )


def _bounds(
    kl_coef: float, lower: float | None, upper: float | None
) -> tuple[float, float]:
    """The bounds of β, those that are None derived from where it starts.

    Arrays, as where runs are mapped over their coefficient, pass unread.
    """
    derived = upper is None
    lower = kl_coef / RANGE if lower is None else lower
    upper = kl_coef * RANGE if upper is None else upper
    checks.non_negative(min_kl_coef=lower)
    if derived and isinstance(upper, int | float) and upper == 0:
        raise checks.InputError(
            f"max_kl_coef: expected a number above 0, got none with a kl_coef of "
            f"{kl_coef:g}, of which it would be {RANGE:g} times; give max_kl_coef"
        )
    checks.positive(max_kl_coef=upper)
    numbers = (lower, kl_coef, upper)
    if all(isinstance(number, int | float) for number in numbers) and not (
        lower <= kl_coef <= upper
    ):
        raise checks.InputError(
            f"kl_coef: expected from min_kl_coef {lower:g} to max_kl_coef {upper:g}, "
            f"got {kl_coef:g}; start within the bounds, or move them"
        )
    return lower, upper


def known_unit(unit: Unit | None, *, target: float) -> Unit:
    """The unit of a target, or InputError where there is none."""
    if unit not in ("response", "token"):
        raise checks.InputError(
            f"target: expected a unit with the target of {target:g} nats, got "
            f"unit={unit!r}; say unit='response' (nats per response) or 'token'"
        )
    return unit
