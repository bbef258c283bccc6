"""The KL coefficient β as a value in the training state, one record a way of moving it.

A controller has a `kl_coef`, in reward units per nat, and an `update` that returns the
next record, a pure function; it is part of every snapshot. Three of them hold the KL at
a target, and say in which unit that is. They are made by `control`, which checks
what it is given.

Those three keep β within [`min_kl_coef`, `max_kl_coef`]. A KL that starts at 0, as that
of every run does, or that stays above its target for long would otherwise move β
without limit: the integral winds up, and β = 0 and β = inf are never left again where β
is multiplied. At a bound β waits, and it moves away with the first error of the other
sign at the latest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks

Array = jax.Array
Schedule = Callable[[Array], Array]

Unit = Literal["response", "token"]
"""Of a target: nats per response, or per token: those of all responses together over
their tokens."""

_LARGEST_ERROR = 0.2  # of the proportional controller, as in OAI


@flax.struct.dataclass
class FixedKL:
    """KL coefficient that stays. It has no target, and so reads no unit."""

    kl_coef: Array  # f32[], reward units per nat

    def update(
        self,
        *,
        kl: Array | None,
        num_episodes: int,
        mean_length: Array | None = None,
    ) -> FixedKL:
        """Itself, whatever was seen."""
        del kl, num_episodes, mean_length
        return self


@flax.struct.dataclass
class ScheduledKL:
    """KL coefficient that is a function of the iteration, as `optax` schedules are.

    It has no target, and so reads no unit.
    """

    kl_coef: Array  # f32[], reward units per nat, schedule(step)
    step: Array  # i32[], iterations done
    schedule: Schedule = flax.struct.field(pytree_node=False)  # i32[] -> f32[]
    num_steps: int = flax.struct.field(pytree_node=False)  # iterations it was read for

    def update(
        self,
        *,
        kl: Array | None,
        num_episodes: int,
        mean_length: Array | None = None,
    ) -> ScheduledKL:
        """The coefficient of the next iteration; what was seen plays no part.

        After the last of its steps it stays: only what was read at the start is used.
        """
        del kl, num_episodes, mean_length
        step = self.step + 1
        kl_coef = self.schedule(jnp.minimum(step, self.num_steps - 1))
        return dataclasses.replace(self, kl_coef=scalar(kl_coef), step=step)


@flax.struct.dataclass
class AdaptiveKL:
    """KL coefficient that chases a target by its own rate (Ziegler et al. 2019)."""

    kl_coef: Array  # f32[], reward units per nat
    min_kl_coef: Array  # f32[], reward units per nat
    max_kl_coef: Array  # f32[], reward units per nat
    target: float = flax.struct.field(pytree_node=False)  # nats per unit
    unit: Unit = flax.struct.field(pytree_node=False)
    horizon: int = flax.struct.field(pytree_node=False)  # episodes

    def update(
        self,
        *,
        kl: Array | None,
        num_episodes: int,
        mean_length: Array | None = None,
    ) -> AdaptiveKL:
        """clip(β·(1 + e·n/horizon)) with e = clip(kl/target - 1, -0.2, 0.2).

        Args:
          kl: f32[], mean over responses of the KL summed over tokens, nats per
            response, whatever the unit of the target. NaN or inf (a broken batch)
            leaves the coefficient as it is, and so does None, an iteration in which no
            KL was taken.
          num_episodes: n, responses since the last KL that was taken.
          mean_length: f32[], mean over the same responses of their tokens; read where
            the unit is the token.

        Raises:
          ValueError: kl is not a scalar, n is so large that β could reach 0, or the
          unit is the token and mean_length is None.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2; the bounds are ours.
        """
        if kl is None:
            return self
        if _LARGEST_ERROR * num_episodes >= self.horizon:
            raise checks.InputError(
                f"num_episodes: expected below {self.horizon / _LARGEST_ERROR:g} (5 "
                f"times the horizon of {self.horizon}), got {num_episodes}; one step "
                "could make the coefficient negative, so raise the horizon"
            )
        seen = _in_unit(kl, mean_length, unit=self.unit)
        error = jnp.clip(seen / self.target - 1.0, -_LARGEST_ERROR, _LARGEST_ERROR)
        error = jnp.where(jnp.isfinite(seen), error, 0.0)
        growth = 1.0 + error * (num_episodes / self.horizon)
        return _moved(self, self.kl_coef * growth)


@flax.struct.dataclass
class ProportionalIntegralKL:
    """KL coefficient that holds a target by a PI controller of log β."""

    kl_coef: Array  # f32[], reward units per nat
    min_kl_coef: Array  # f32[], reward units per nat
    max_kl_coef: Array  # f32[], reward units per nat
    error: Array  # f32[], e of the last update, dimensionless
    target: float = flax.struct.field(pytree_node=False)  # nats per unit
    unit: Unit = flax.struct.field(pytree_node=False)
    proportional: float = flax.struct.field(pytree_node=False)  # kp, per unit of error
    integral: float = flax.struct.field(pytree_node=False)  # ki, and per update
    max_error: float = flax.struct.field(pytree_node=False)  # of e, dimensionless

    def update(
        self,
        *,
        kl: Array | None,
        num_episodes: int,
        mean_length: Array | None = None,
    ) -> ProportionalIntegralKL:
        """log β += kp·(e - e_before) + ki·e with e = clip(kl/target - 1, ±max_error).

        Within the bounds the steps of a run add up to log β = log β_0 + kp·e + ki·Σe.
        At a bound the sum stops: what would lead beyond is not remembered, so that β
        turns with the error. A gain is that of an update in which a KL was taken,
        however many responses it was taken over.

        Args:
          kl, mean_length: as in `AdaptiveKL.update`.
          num_episodes: not read.

        Raises:
          ValueError: kl is not a scalar, or the unit is the token and mean_length is
          None.
        """
        del num_episodes
        if kl is None:
            return self
        seen = _in_unit(kl, mean_length, unit=self.unit)
        error = jnp.clip(seen / self.target - 1.0, -self.max_error, self.max_error)
        move = self.proportional * (error - self.error) + self.integral * error
        usable = jnp.isfinite(seen)
        return dataclasses.replace(
            _moved(self, self.kl_coef * jnp.where(usable, jnp.exp(move), 1.0)),
            error=jnp.where(usable, error, self.error),
        )


@flax.struct.dataclass
class LagrangianKL:
    """KL coefficient that is the multiplier of max E[r] such that KL <= target.

    Where the policy stays within its budget by itself, it falls to its lower bound,
    which is 0 unless another was asked for.
    """

    kl_coef: Array  # f32[], reward units per nat
    min_kl_coef: Array  # f32[], reward units per nat
    max_kl_coef: Array  # f32[], reward units per nat
    target: float = flax.struct.field(pytree_node=False)  # nats per unit
    unit: Unit = flax.struct.field(pytree_node=False)
    # η, reward units per nat, for each nat (per unit) of excess
    learning_rate: float = flax.struct.field(pytree_node=False)

    def update(
        self,
        *,
        kl: Array | None,
        num_episodes: int,
        mean_length: Array | None = None,
    ) -> LagrangianKL:
        """clip(β + η·(kl - target)), a step of projected dual gradient ascent.

        Args:
          kl, mean_length: as in `AdaptiveKL.update`.
          num_episodes: not read.

        Raises:
          ValueError: kl is not a scalar, or the unit is the token and mean_length is
          None.
        """
        del num_episodes
        if kl is None:
            return self
        seen = _in_unit(kl, mean_length, unit=self.unit)
        excess = jnp.where(jnp.isfinite(seen), seen - self.target, 0.0)
        return _moved(self, self.kl_coef + self.learning_rate * excess)


KLController = (
    FixedKL | ScheduledKL | AdaptiveKL | ProportionalIntegralKL | LagrangianKL
)


def scalar(number: float | Array) -> Array:
    """f32[], a buffer of its own, as the state that it becomes part of is donated."""
    return jnp.array(number, jnp.float32)


Held = TypeVar("Held", AdaptiveKL, ProportionalIntegralKL, LagrangianKL)


def _moved(controller: Held, kl_coef: Array) -> Held:
    """The controller with another coefficient, brought within its bounds."""
    within = jnp.clip(kl_coef, controller.min_kl_coef, controller.max_kl_coef)
    return dataclasses.replace(controller, kl_coef=within)


def _in_unit(kl: Array, mean_length: Array | None, *, unit: Unit) -> Array:
    """A KL in nats per response, as it is or per token; f32[]."""
    checks.shape((), kl=kl)
    if unit == "response":
        return kl
    if mean_length is None:
        raise checks.InputError(
            "mean_length: expected the mean tokens of a response, as the target is in "
            "nats per token, got none; pass mean_length, or a target per response"
        )
    checks.shape((), mean_length=mean_length)
    return kl / mean_length
