"""Constructors of the controllers of the KL coefficient β; they check their numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.controllers import (
    FixedKL,
    KLController,
    Schedule,
    ScheduledKL,
    scalar,
)

Array = jax.Array


def fixed(kl_coef: float | Shaped[Array, ""]) -> FixedKL:
    """A constant coefficient.

    Args:
      kl_coef: β, reward units per nat; 0.0 is no penalty. An array is not read.

    Returns:
      The controller.

    Raises:
      InputError: kl_coef is negative, NaN or infinite.

    >>> print(fixed(0.05).kl_coef)
    0.05
    >>> fixed(-0.05)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.number_checks.InputError: kl_coef: expected a finite number, 0
        or more, got -0.05; choose kl_coef >= 0
    """
    checks.non_negative(kl_coef=kl_coef)
    return FixedKL(kl_coef=scalar(kl_coef))


def scheduled(schedule: Schedule, *, num_steps: int) -> ScheduledKL:
    """A coefficient that is a function of the iteration.

    Args:
      schedule: i32[] -> f32[], iteration to reward units per nat. Cached programs
        compare it by identity, so build it once.
      num_steps: iterations of the run. The schedule is evaluated at each of them here.

    Returns:
      The controller, at iteration 0.

    Raises:
      ValueError: the schedule does not return a scalar. InputError: it returns a number
      that is negative, NaN or infinite; the message names the step.

    >>> controller = scheduled(lambda step: 0.4 * 0.5**step, num_steps=3)
    >>> print(controller.kl_coef)
    0.4
    >>> scheduled(lambda step: 0.5 - step, num_steps=3)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.number_checks.InputError: schedule(1): expected a finite number,
        0 or more, got -0.5; choose schedule(1) >= 0
    """
    checks.positive(num_steps=num_steps)
    first = jnp.asarray(schedule(jnp.zeros((), jnp.int32)), jnp.float32)
    checks.shape((), **{"schedule(0)": first})
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    for step, kl_coef in enumerate(
        np.asarray(jax.lax.map(lambda step: scalar(schedule(step)), steps))
    ):
        checks.non_negative(**{f"schedule({step})": float(kl_coef)})
    return ScheduledKL(
        kl_coef=scalar(first),
        step=jnp.zeros((), jnp.int32),
        schedule=schedule,
        num_steps=num_steps,
    )


def require_covers(controller: KLController, *, num_steps: int) -> None:
    """Checks that a scheduled controller covers a run.

    Args:
      controller: any controller; the others cover every run.
      num_steps: iterations of the run.

    Raises:
      InputError: the schedule has fewer steps than the run.

    >>> controller = scheduled(lambda step: 0.1 / (1 + step), num_steps=10)
    >>> print(require_covers(controller, num_steps=10))
    None
    >>> require_covers(controller, num_steps=20)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.number_checks.InputError: the schedule of kl_coef: expected the
        20 steps of the run, got 10; make it with num_steps=20, or run fewer
    """
    if isinstance(controller, ScheduledKL) and controller.num_steps < num_steps:
        raise checks.InputError(
            f"the schedule of kl_coef: expected the {num_steps} steps of the run, got "
            f"{controller.num_steps}; make it with num_steps={num_steps}, or run fewer"
        )
