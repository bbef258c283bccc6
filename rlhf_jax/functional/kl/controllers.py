"""Controllers of the KL coefficient β: one record per rule, part of the training state.

A controller has a `kl_coef`, in reward units per nat, and a pure method `update` that
returns the next record. It is part of every snapshot. `control` makes controllers from
checked numbers.

Controllers with a target keep β within [`min_kl_coef`, `max_kl_coef`]. Without bounds,
a KL that starts at 0, as in every run, or that stays above its target for long would
move β without limit: the integral winds up, and a β that is multiplied never leaves 0
or infinity. β leaves a bound once the error changes its sign, at the latest.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Literal, Self

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32, Shaped

from rlhf_jax.functional import checks

Array = jax.Array
Schedule = Callable[[Array], Array]
"""β of an iteration: i32[] -> f32[], reward units per nat."""
Unit = Literal["response", "token"]
"""Unit of a target: nats per response, or nats per token, which is the KL of all
responses divided by the number of their tokens."""

_LARGEST_ERROR = 0.2  # of AdaptiveKL, as in openai/lm-human-preferences


@flax.struct.dataclass
class FixedKL:
    """A constant KL coefficient."""

    kl_coef: Float32[Array, ""]  # reward units per nat

    def update(
        self,
        *,
        kl: Float32[Array, ""] | None,
        num_episodes: int,
        mean_length: Float32[Array, ""] | None = None,
    ) -> FixedKL:
        """Returns the same record, whatever the KL.

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
    """A KL coefficient that is a function of the iteration, as an optax schedule."""

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
        """Returns the record of the next iteration; after the last, β is constant.

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


@flax.struct.dataclass
class _TargetKL(abc.ABC):
    """A KL coefficient that moves to keep the KL at a target."""

    kl_coef: Float32[Array, ""]  # reward units per nat
    min_kl_coef: Float32[Array, ""]  # reward units per nat
    max_kl_coef: Float32[Array, ""]  # reward units per nat
    target: float = flax.struct.field(pytree_node=False)  # nats per unit
    unit: Unit = flax.struct.field(pytree_node=False)

    def update(
        self,
        *,
        kl: Float32[Array, ""] | None,
        num_episodes: int,
        mean_length: Float32[Array, ""] | None = None,
    ) -> Self:
        """Returns the next record, by the rule of the class, with β within its bounds.

        Args:
          kl: f32[], mean over responses of the KL summed over tokens, nats per
            response, whatever the unit of the target. β does not change where kl is
            NaN, infinite, or None (an iteration that measured no KL).
          num_episodes: n, responses since the last measured KL; read by `AdaptiveKL`.
          mean_length: f32[], mean number of tokens of the same responses; read where
            the unit is the token.

        Raises:
          ValueError: kl is not a scalar, the unit is the token and mean_length is None,
          or n is so large that the β of `AdaptiveKL` could reach 0.
        """
        # Static: a step without a KL is another program.
        if kl is None:
            return self
        checks.shape((), kl=kl)
        if self.unit == "token":
            if mean_length is None:
                raise checks.InputError(
                    "mean_length: expected the mean tokens of a response, as the "
                    "target is in nats per token, got none; pass mean_length, or a "
                    "target per response"
                )
            checks.shape((), mean_length=mean_length)
            kl = kl / mean_length
        return self._next(kl, num_episodes=num_episodes)

    @abc.abstractmethod
    def _next(self, kl: Array, *, num_episodes: int) -> Self:
        """The next record, from a KL in nats per unit that may be NaN or infinite."""

    def _with(self, kl_coef: Array) -> Self:
        """The same record with another coefficient, clipped to its bounds."""
        within = jnp.clip(kl_coef, self.min_kl_coef, self.max_kl_coef)
        return dataclasses.replace(self, kl_coef=within)


@flax.struct.dataclass
class AdaptiveKL(_TargetKL):
    """β ← clip(β·(1 + e·n/horizon)) with e = clip(kl/target - 1, -0.2, 0.2).

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2, which has no bounds.

    >>> bounds = {"min_kl_coef": scalar(0.01), "max_kl_coef": scalar(1.0)}
    >>> target = {"target": 6.0, "unit": "response", "horizon": 1000}
    >>> start = AdaptiveKL(kl_coef=scalar(0.1), **bounds, **target)
    >>> print(start.update(kl=scalar(12.0), num_episodes=100).kl_coef)  # 0.1·1.02
    0.102
    >>> print(start.update(kl=scalar(0.0), num_episodes=100).kl_coef)
    0.098
    """

    horizon: int = flax.struct.field(pytree_node=False)  # episodes

    def _next(self, kl: Array, *, num_episodes: int) -> Self:
        horizon = checks.number(self.horizon)
        if horizon is not None:
            checks.within(
                below=horizon / _LARGEST_ERROR,
                advice=f"5 times the horizon of {horizon}: one step could make the "
                f"coefficient negative, so raise the horizon",
                num_episodes=num_episodes,
            )
        error = jnp.clip(kl / self.target - 1.0, -_LARGEST_ERROR, _LARGEST_ERROR)
        # A NaN would stay in β, and in every snapshot, for the rest of the run.
        error = jnp.where(jnp.isfinite(kl), error, 0.0)
        growth = 1.0 + error * (num_episodes / self.horizon)
        return self._with(self.kl_coef * growth)


@flax.struct.dataclass
class ProportionalIntegralKL(_TargetKL):
    """log β += kp·(e - e_before) + ki·e with e = clip(kl/target - 1, ±max_error).

    Within the bounds the updates of a run add up to log β = log β_0 + kp·e + ki·Σe. At
    a bound the sum stops growing, so β moves back as soon as the error changes its
    sign. The gains are per update with a KL, for any number of responses.

    >>> bounds = {"min_kl_coef": scalar(0.01), "max_kl_coef": scalar(1.0)}
    >>> target = {"target": 6.0, "unit": "response", "max_error": 1.0}
    >>> gains = {"proportional": 0.0, "integral": float(jnp.log(2.0))}
    >>> start = ProportionalIntegralKL(
    ...     kl_coef=scalar(0.1), error=scalar(0.0), **bounds, **target, **gains
    ... )
    >>> twice = start.update(kl=scalar(12.0), num_episodes=64)  # an error of 1
    >>> print(twice.kl_coef)
    0.2
    >>> print(twice.update(kl=scalar(0.0), num_episodes=64).kl_coef)
    0.1
    """

    error: Float32[Array, ""]  # e of the last update, dimensionless
    proportional: float = flax.struct.field(pytree_node=False)  # kp, of log β per error
    integral: float = flax.struct.field(pytree_node=False)  # ki, the same per update
    max_error: float = flax.struct.field(pytree_node=False)  # largest |e|

    def _next(self, kl: Array, *, num_episodes: int) -> Self:
        del num_episodes
        error = jnp.clip(kl / self.target - 1.0, -self.max_error, self.max_error)
        move = self.proportional * (error - self.error) + self.integral * error
        usable = jnp.isfinite(kl)
        return dataclasses.replace(
            self._with(self.kl_coef * jnp.where(usable, jnp.exp(move), 1.0)),
            # The next proportional step starts from the last measured KL.
            error=jnp.where(usable, error, self.error),
        )


@flax.struct.dataclass
class LagrangianKL(_TargetKL):
    """β ← clip(β + η·(kl - target)), a step of projected dual gradient ascent.

    β is the Lagrange multiplier of max E[r] with KL <= target. Where the KL stays below
    the target by itself, β falls to its lower bound.

    >>> bounds = {"min_kl_coef": scalar(0.0), "max_kl_coef": scalar(1.0)}
    >>> target = {"target": 0.5, "unit": "token", "learning_rate": 0.1}
    >>> start = LagrangianKL(kl_coef=scalar(0.2), **bounds, **target)
    >>> lengths = {"num_episodes": 64, "mean_length": scalar(10.0)}
    >>> print(start.update(kl=scalar(15.0), **lengths).kl_coef)  # 1 nat too much
    0.3
    >>> print(start.update(kl=scalar(0.0), **lengths).kl_coef)
    0.15
    """

    # η, reward units per nat, for each nat (per unit) of excess
    learning_rate: float = flax.struct.field(pytree_node=False)

    def _next(self, kl: Array, *, num_episodes: int) -> Self:
        del num_episodes
        # Not clipped, as in dual ascent: a large excess moves β far, up to its bound.
        excess = jnp.where(jnp.isfinite(kl), kl - self.target, 0.0)
        return self._with(self.kl_coef + self.learning_rate * excess)


KLController = (
    FixedKL | ScheduledKL | AdaptiveKL | ProportionalIntegralKL | LagrangianKL
)


def scalar(number: float | Shaped[Array, ""]) -> Float32[Array, ""]:
    """Copies a number as f32[]: a donated state must not share its buffers.

    >>> print(scalar(0.05).dtype, scalar(0.05).shape)
    float32 ()
    >>> kl_coef = scalar(0.05)
    >>> scalar(kl_coef) is kl_coef
    False
    """
    return jnp.array(number, jnp.float32)
