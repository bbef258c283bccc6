"""The KL coefficient β as a value in the training state: fixed, scheduled or adaptive.

A controller is a record with a `kl_coef` and an `update` that returns the next record;
it is part of every snapshot. Make one with `fixed`, `scheduled` or `adaptive`, which
check what they are given. The usual range of β is 0.02-0.1 reward units per nat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks

Array = jax.Array
Schedule = Callable[[Array], Array]

_LARGEST_ERROR = 0.2  # of the proportional controller, as in OAI


@flax.struct.dataclass
class FixedKL:
    """KL coefficient that stays."""

    kl_coef: Array  # f32[], reward units per nat

    def update(self, *, kl: Array | None, num_episodes: int) -> FixedKL:
        """Itself, whatever was seen."""
        del kl, num_episodes
        return self


@flax.struct.dataclass
class ScheduledKL:
    """KL coefficient that is a function of the iteration, as `optax` schedules are."""

    kl_coef: Array  # f32[], reward units per nat, schedule(step)
    step: Array  # i32[], iterations done
    schedule: Schedule = flax.struct.field(pytree_node=False)  # i32[] -> f32[]

    def update(self, *, kl: Array | None, num_episodes: int) -> ScheduledKL:
        """The coefficient of the next iteration; what was seen plays no part."""
        del kl, num_episodes
        step = self.step + 1
        return dataclasses.replace(
            self, kl_coef=_scalar(self.schedule(step)), step=step
        )


@flax.struct.dataclass
class AdaptiveKL:
    """KL coefficient that chases a target (Ziegler et al. 2019)."""

    kl_coef: Array  # f32[], reward units per nat
    target: float = flax.struct.field(pytree_node=False)  # nats per response
    horizon: int = flax.struct.field(pytree_node=False)  # episodes

    def update(self, *, kl: Array | None, num_episodes: int) -> AdaptiveKL:
        """β·(1 + e·n/horizon) with e = clip(kl/target - 1, -0.2, 0.2).

        Args:
          kl: f32[], mean over responses of the KL summed over tokens, nats per
            response. NaN or inf (a broken batch) leaves the coefficient as it is, and
            so does None, an iteration in which no KL was taken.
          num_episodes: n, responses since the last KL that was taken.

        Raises:
          ValueError: kl is not a scalar, or n is so large that β could reach 0.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
        """
        if kl is None:
            return self
        checks.shape((), kl=kl)
        if _LARGEST_ERROR * num_episodes >= self.horizon:
            raise checks.InputError(
                f"num_episodes: expected below {self.horizon / _LARGEST_ERROR:g} (5 "
                f"times the horizon of {self.horizon}), got {num_episodes}; one step "
                "could make the coefficient negative, so raise the horizon"
            )
        error = jnp.clip(kl / self.target - 1.0, -_LARGEST_ERROR, _LARGEST_ERROR)
        error = jnp.where(jnp.isfinite(kl), error, 0.0)
        growth = 1.0 + error * (num_episodes / self.horizon)
        return dataclasses.replace(self, kl_coef=self.kl_coef * growth)


KLController = FixedKL | ScheduledKL | AdaptiveKL


def fixed(kl_coef: float) -> FixedKL:
    """A coefficient that stays, reward units per nat; 0.0 is no penalty.

    Raises:
      ValueError: kl_coef is negative, NaN or infinite.
    """
    checks.non_negative(kl_coef=kl_coef)
    return FixedKL(kl_coef=_scalar(kl_coef))


def scheduled(schedule: Schedule) -> ScheduledKL:
    """A coefficient that follows `schedule`, iteration -> reward units per nat.

    `schedule` is compared by identity when programs are cached: build it once.

    Raises:
      ValueError: schedule(0) is not one number, or is negative, NaN or infinite.
    """
    first = _scalar(schedule(jnp.zeros((), jnp.int32)))
    checks.shape((), **{"schedule(0)": first})
    checks.non_negative(**{"schedule(0)": float(first)})
    return ScheduledKL(kl_coef=first, step=jnp.zeros((), jnp.int32), schedule=schedule)


def adaptive(kl_coef: float, *, target: float, horizon: int) -> AdaptiveKL:
    """A coefficient that starts at `kl_coef` and holds the KL at `target`.

    OAI: 0.15 reward units per nat, 6 nats per response, 10000 episodes.

    Raises:
      ValueError: an argument is not positive and finite (a coefficient of 0 could
      never move, as it is multiplied).
    """
    checks.positive(kl_coef=kl_coef, target=target, horizon=horizon)
    return AdaptiveKL(kl_coef=_scalar(kl_coef), target=target, horizon=horizon)


def _scalar(number: float | Array) -> Array:
    return jnp.asarray(number, jnp.float32)
