"""Constructors of the controllers that keep the KL near a target."""

from __future__ import annotations

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.target_controllers import (
    AdaptiveKL,
    LagrangianKL,
    ProportionalIntegralKL,
    Unit,
    scalar,
)

RANGE = 10.0  # default bounds of β over, and under, its start


def adaptive(
    kl_coef: float,
    *,
    target: float,
    unit: Unit | None = None,
    horizon: int,
    min_kl_coef: float | None = None,
    max_kl_coef: float | None = None,
) -> AdaptiveKL:
    """A coefficient that is multiplied by at most 1 ± 0.2·n/horizon per n episodes.

    openai/lm-human-preferences: β 0.15 reward units per nat at the start, a target of 6
    nats per response, a horizon of 10000 episodes.

    Args:
      kl_coef: β at the start, reward units per nat, above 0 as it is multiplied.
      target: KL to keep, nats per `unit`.
      unit: "response" or "token".
      horizon: episodes over which β changes by about a fifth at most.
      min_kl_coef: smallest β, reward units per nat, above 0; None is kl_coef / 10.
      max_kl_coef: largest β, reward units per nat; None is 10 kl_coef.

    Returns:
      The controller.

    Raises:
      InputError: an argument is not positive and finite, unit is None, or kl_coef is
      outside the bounds.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    >>> controller = adaptive(0.1, target=6.0, unit="response", horizon=1000)
    >>> print(controller.min_kl_coef, controller.max_kl_coef)
    0.01 1.0
    >>> adaptive(0.0, target=6.0, unit="response", horizon=1000)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.number_checks.InputError: kl_coef: expected a finite number
        above 0, got 0.0; choose kl_coef > 0
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
    """A coefficient whose logarithm a proportional-integral controller moves.

    With the default bounds β returns from either bound to its start within
    (log 10 - 2 kp)/ki updates with an error of 1: 35 for a kp of 0.3 and a ki of 0.05.

    Args:
      kl_coef: β at the start, reward units per nat, above 0 as it is multiplied.
      target: KL to keep, nats per `unit`.
      unit: "response" or "token".
      proportional: kp, change of log β for an error of 1; it damps. 0 disables it.
      integral: ki, change of log β per update for an error of 1; it brings the error to
        0.
      max_error: largest |kl/target - 1| that counts; an error of 1 is a KL of twice the
        target, and of -1 a KL of 0.
      min_kl_coef: smallest β, reward units per nat, above 0; None is kl_coef / 10.
      max_kl_coef: largest β, reward units per nat; None is 10 kl_coef.

    Returns:
      The controller.

    Raises:
      InputError: proportional is negative, another number is not positive and finite,
      unit is None, or kl_coef is outside the bounds.

    >>> gains = {"proportional": 0.3, "integral": 0.05}
    >>> controller = pi(0.1, target=0.05, unit="token", **gains)
    >>> print(controller.kl_coef, controller.target, controller.unit)
    0.1 0.05 token
    >>> pi(0.1, target=0.05, **gains)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.number_checks.InputError: target: expected a unit with the
        target of 0.05 nats, got unit=None; say unit='response' (nats per response) or
        'token'
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
    """A coefficient that is the Lagrange multiplier of the constraint KL <= target.

    Args:
      kl_coef: β at the start, reward units per nat, 0 or more as it is added to.
      target: largest KL, nats per `unit`.
      unit: "response" or "token".
      learning_rate: η, change of β for each nat (per unit) above the target.
      min_kl_coef: smallest β, reward units per nat; None is 0.
      max_kl_coef: largest β, reward units per nat; None is 10 kl_coef, which must then
        be above 0.

    Returns:
      The controller.

    Raises:
      InputError: kl_coef is negative, another number is not positive and finite, unit
      is None, or kl_coef is outside the bounds.

    >>> target = {"target": 6.0, "unit": "response", "learning_rate": 0.001}
    >>> controller = lagrangian(0.1, **target)
    >>> print(controller.min_kl_coef, controller.max_kl_coef)
    0.0 1.0
    >>> print(lagrangian(0.0, max_kl_coef=1.0, **target).kl_coef)
    0.0
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


def _bounds(
    kl_coef: float, lower: float | None, upper: float | None
) -> tuple[float, float]:
    """The bounds of β; None stands for one derived from its start.

    Arrays are not read: runs may be mapped over their coefficient.
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
    """The unit of a target, which has no default.

    Args:
      unit: "response", "token" or None.
      target: nats per unit, for the error.

    Returns:
      The unit.

    Raises:
      InputError: it is neither "response" nor "token".

    >>> known_unit("token", target=0.05)
    'token'
    >>> known_unit(None, target=6.0)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.number_checks.InputError: target: expected a unit with the
        target of 6 nats, got unit=None; say unit='response' (nats per response) or
        'token'
    """
    if unit not in ("response", "token"):
        raise checks.InputError(
            f"target: expected a unit with the target of {target:g} nats, got "
            f"unit={unit!r}; say unit='response' (nats per response) or 'token'"
        )
    return unit
