"""The KL coefficient β as a value in the training state, with one record per rule.

A controller has a `kl_coef`, in reward units per nat, and a pure method `update` that
returns the next record. It is part of every snapshot. Three controllers keep the KL
near a target, whose unit they name. `coefficients` makes controllers from checked
numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32

from rlhf_jax.functional.kl.target_controllers import (
    AdaptiveKL,
    LagrangianKL,
    ProportionalIntegralKL,
    Unit,
    scalar,
)

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "KLController",
    "LagrangianKL",
    "ProportionalIntegralKL",
    "Schedule",
    "ScheduledKL",
    "Unit",
    "scalar",
]

Array = jax.Array
Schedule = Callable[[Array], Array]
"""β of an iteration: i32[] -> f32[], reward units per nat."""


@flax.struct.dataclass
class FixedKL:
    """KL coefficient that is constant."""

    kl_coef: Float32[Array, ""]  # reward units per nat

    def update(
        self,
        *,
        kl: Float32[Array, ""] | None,
        num_episodes: int,
        mean_length: Float32[Array, ""] | None = None,
    ) -> FixedKL:
        """The same record, whatever the KL.

        Args:
          kl, num_episodes, mean_length: not read.

        >>> controller = FixedKL(kl_coef=scalar(0.1))
        >>> print(controller.update(kl=scalar(9.0), num_episodes=64).kl_coef)
        0.1
        >>> print(controller.update(kl=None, num_episodes=64).kl_coef)
        0.1
        """
        del kl, num_episodes, mean_length
        return self


@flax.struct.dataclass
class ScheduledKL:
    """KL coefficient that is a function of the iteration, as `optax` schedules are."""

    kl_coef: Float32[Array, ""]  # reward units per nat, schedule(step)
    step: Int32[Array, ""]  # iterations done
    schedule: Schedule = flax.struct.field(pytree_node=False)  # i32[] -> f32[]
    num_steps: int = flax.struct.field(pytree_node=False)  # iterations of the run

    def update(
        self,
        *,
        kl: Float32[Array, ""] | None,
        num_episodes: int,
        mean_length: Float32[Array, ""] | None = None,
    ) -> ScheduledKL:
        """The coefficient of the next iteration; after the last one it is constant.

        Args:
          kl, num_episodes, mean_length: not read.

        >>> halve = lambda step: 0.4 * 0.5**step
        >>> start = ScheduledKL(scalar(0.4), jnp.array(0), schedule=halve, num_steps=2)
        >>> second = start.update(kl=None, num_episodes=64)
        >>> print(second.kl_coef, second.step)
        0.2 1
        >>> print(second.update(kl=None, num_episodes=64).kl_coef)  # 2 steps
        0.2
        """
        del kl, num_episodes, mean_length
        step = self.step + 1
        kl_coef = self.schedule(jnp.minimum(step, self.num_steps - 1))
        return dataclasses.replace(self, kl_coef=scalar(kl_coef), step=step)


KLController = (
    FixedKL | ScheduledKL | AdaptiveKL | ProportionalIntegralKL | LagrangianKL
)
