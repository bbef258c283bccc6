"""Controllers that keep the KL near a target by moving the KL coefficient β.

They keep β within [`min_kl_coef`, `max_kl_coef`]. Without bounds, a KL that starts at
0, as in every run, or that stays above its target for long would move β without limit:
the integral winds up, and a β that is multiplied never leaves 0 or infinity. At a bound
β stays until the error changes its sign, at the latest.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Float32, Shaped

from rlhf_jax.functional import checks

Array = jax.Array

Unit = Literal["response", "token"]
"""Unit of a target: nats per response, or nats per token. The latter is the KL of all
responses divided by the number of their tokens."""

_LARGEST_ERROR = 0.2  # of AdaptiveKL, as in openai/lm-human-preferences


@flax.struct.dataclass
class AdaptiveKL:
    """KL coefficient that is multiplied according to the error of the KL.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    kl_coef: Float32[Array, ""]  # reward units per nat
    min_kl_coef: Float32[Array, ""]  # reward units per nat
    max_kl_coef: Float32[Array, ""]  # reward units per nat
    target: float = flax.struct.field(pytree_node=False)  # nats per unit
    unit: Unit = flax.struct.field(pytree_node=False)
    horizon: int = flax.struct.field(pytree_node=False)  # episodes

    def update(
        self,
        *,
        kl: Float32[Array, ""] | None,
        num_episodes: int,
        mean_length: Float32[Array, ""] | None = None,
    ) -> AdaptiveKL:
        """clip(β·(1 + e·n/horizon)) with e = clip(kl/target - 1, -0.2, 0.2).

        Args:
          kl: f32[], mean over responses of the KL summed over tokens, nats per
            response, whatever the unit of the target. The coefficient stays where kl is
            NaN or infinite, and where it is None: an iteration that measured no KL.
          num_episodes: n, responses since the last KL that was measured.
          mean_length: f32[], mean number of tokens of the same responses; read where
            the unit is the token.

        Returns:
          The next record, with β within its bounds.

        Raises:
          ValueError: kl is not a scalar, n is so large that β could reach 0, or the
          unit is the token and mean_length is None.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2, which has no bounds.

        >>> bounds = {"min_kl_coef": scalar(0.01), "max_kl_coef": scalar(1.0)}
        >>> target = {"target": 6.0, "unit": "response", "horizon": 1000}
        >>> start = AdaptiveKL(kl_coef=scalar(0.1), **bounds, **target)
        >>> print(start.update(kl=scalar(12.0), num_episodes=100).kl_coef)  # 0.1·1.02
        0.102
        >>> print(start.update(kl=scalar(0.0), num_episodes=100).kl_coef)
        0.098
        """
        if kl is None:
            return self
        if _LARGEST_ERROR * num_episodes >= self.horizon:
            raise checks.InputError(
                f"num_episodes: expected below {self.horizon / _LARGEST_ERROR:g} (5 "
                f"times the horizon of {self.horizon}), got {num_episodes}; one step "
                "could make the coefficient negative, so raise the horizon"
            )
        measured = _in_unit(kl, mean_length, unit=self.unit)
        error = jnp.clip(measured / self.target - 1.0, -_LARGEST_ERROR, _LARGEST_ERROR)
        error = jnp.where(jnp.isfinite(measured), error, 0.0)
        growth = 1.0 + error * (num_episodes / self.horizon)
        return _moved(self, self.kl_coef * growth)


@flax.struct.dataclass
class ProportionalIntegralKL:
    """KL coefficient whose logarithm a PI controller moves, to keep a target."""

    kl_coef: Float32[Array, ""]  # reward units per nat
    min_kl_coef: Float32[Array, ""]  # reward units per nat
    max_kl_coef: Float32[Array, ""]  # reward units per nat
    error: Float32[Array, ""]  # e of the last update, dimensionless
    target: float = flax.struct.field(pytree_node=False)  # nats per unit
    unit: Unit = flax.struct.field(pytree_node=False)
    proportional: float = flax.struct.field(pytree_node=False)  # kp, of log β per error
    integral: float = flax.struct.field(pytree_node=False)  # ki, the same per update
    max_error: float = flax.struct.field(pytree_node=False)  # largest |e|

    def update(
        self,
        *,
        kl: Float32[Array, ""] | None,
        num_episodes: int,
        mean_length: Float32[Array, ""] | None = None,
    ) -> ProportionalIntegralKL:
        """log β += kp·(e - e_before) + ki·e with e = clip(kl/target - 1, ±max_error).

        Within the bounds the updates of a run add up to log β = log β_0 + kp·e + ki·Σe.
        At a bound the sum stops growing, so β moves back as soon as the error changes
        its sign. The gains are per update with a KL, for any number of responses.

        Args:
          kl: f32[], mean over responses of the KL summed over tokens, nats per
            response, whatever the unit of the target. The coefficient stays where kl is
            NaN or infinite, and where it is None: an iteration that measured no KL.
          num_episodes: not read.
          mean_length: f32[], mean number of tokens of the same responses; read where
            the unit is the token.

        Returns:
          The next record, with β within its bounds.

        Raises:
          ValueError: kl is not a scalar, or the unit is the token and mean_length is
          None.

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
        del num_episodes
        if kl is None:
            return self
        measured = _in_unit(kl, mean_length, unit=self.unit)
        error = jnp.clip(measured / self.target - 1.0, -self.max_error, self.max_error)
        move = self.proportional * (error - self.error) + self.integral * error
        usable = jnp.isfinite(measured)
        return dataclasses.replace(
            _moved(self, self.kl_coef * jnp.where(usable, jnp.exp(move), 1.0)),
            error=jnp.where(usable, error, self.error),
        )


@flax.struct.dataclass
class LagrangianKL:
    """KL coefficient that is the Lagrange multiplier of max E[r] with KL <= target.

    Where the KL stays below the target by itself, β falls to its lower bound.
    """

    kl_coef: Float32[Array, ""]  # reward units per nat
    min_kl_coef: Float32[Array, ""]  # reward units per nat
    max_kl_coef: Float32[Array, ""]  # reward units per nat
    target: float = flax.struct.field(pytree_node=False)  # nats per unit
    unit: Unit = flax.struct.field(pytree_node=False)
    # η, reward units per nat, for each nat (per unit) of excess
    learning_rate: float = flax.struct.field(pytree_node=False)

    def update(
        self,
        *,
        kl: Float32[Array, ""] | None,
        num_episodes: int,
        mean_length: Float32[Array, ""] | None = None,
    ) -> LagrangianKL:
        """clip(β + η·(kl - target)), a step of projected dual gradient ascent.

        Args:
          kl: f32[], mean over responses of the KL summed over tokens, nats per
            response, whatever the unit of the target. The coefficient stays where kl is
            NaN or infinite, and where it is None: an iteration that measured no KL.
          num_episodes: not read.
          mean_length: f32[], mean number of tokens of the same responses; read where
            the unit is the token.

        Returns:
          The next record, with β within its bounds.

        Raises:
          ValueError: kl is not a scalar, or the unit is the token and mean_length is
          None.

        >>> bounds = {"min_kl_coef": scalar(0.0), "max_kl_coef": scalar(1.0)}
        >>> target = {"target": 0.5, "unit": "token", "learning_rate": 0.1}
        >>> start = LagrangianKL(kl_coef=scalar(0.2), **bounds, **target)
        >>> lengths = {"num_episodes": 64, "mean_length": scalar(10.0)}
        >>> print(start.update(kl=scalar(15.0), **lengths).kl_coef)  # 1 nat too much
        0.3
        >>> print(start.update(kl=scalar(0.0), **lengths).kl_coef)
        0.15
        """
        del num_episodes
        if kl is None:
            return self
        measured = _in_unit(kl, mean_length, unit=self.unit)
        excess = jnp.where(jnp.isfinite(measured), measured - self.target, 0.0)
        return _moved(self, self.kl_coef + self.learning_rate * excess)


def scalar(number: float | Shaped[Array, ""]) -> Float32[Array, ""]:
    """A copy of a number as f32[]: a donated state must not share its buffers.

    Args:
      number: a number or a scalar array, in any unit.

    Returns:
      f32[] in a buffer of its own.

    >>> print(scalar(0.05).dtype, scalar(0.05).shape)
    float32 ()
    >>> kl_coef = scalar(0.05)
    >>> scalar(kl_coef) is kl_coef
    False
    """
    return jnp.array(number, jnp.float32)


Bounded = TypeVar("Bounded", AdaptiveKL, ProportionalIntegralKL, LagrangianKL)


def _moved(controller: Bounded, kl_coef: Array) -> Bounded:
    """The controller with another coefficient, clipped to its bounds."""
    within = jnp.clip(kl_coef, controller.min_kl_coef, controller.max_kl_coef)
    return dataclasses.replace(controller, kl_coef=within)


def _in_unit(
    kl: Float32[Array, ""], mean_length: Float32[Array, ""] | None, *, unit: Unit
) -> Float32[Array, ""]:
    """A KL in nats per response, converted to the unit."""
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
