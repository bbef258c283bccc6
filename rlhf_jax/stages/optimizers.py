"""Adam as PPO is used to it: eps 1e-5, inside or outside of the bias correction."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.functional import checks

Array = jax.Array

Style = Literal["standard", "tf"]
"""Where eps stands: sqrt(v̂) + eps as in the paper, or sqrt(v) + eps as in TF 1."""


def adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-5,
    style: Style = "standard",
) -> optax.GradientTransformation:
    """Adam, its m and v the running means of the gradient and of its square.

        standard  -lr · m̂ / (sqrt(v̂) + eps)    m̂ = m/(1 - b1^t), v̂ = v/(1 - b2^t)
        tf        -lr · sqrt(1 - b2^t)/(1 - b1^t) · m / (sqrt(v) + eps)

    The second is the first with eps/sqrt(1 - b2^t) in place of eps: 32 times as much in
    the first step with b2 = 0.999, 1.2 times in step 1200. Gradients that are small
    beside it then hardly move their parameters early in the run.

    Args:
      learning_rate: lr, or update (from 0) -> lr, as `optax` schedules are.
      b1, b2: decay an update, 0 to below 1.
      eps: unit of the gradient.
      style: where eps stands. OAI: tf.

    Returns:
      To be chained after clipping by norm. The state of both styles has one structure.

    Raises:
      InputError: no such style, or a number out of its range.

    Source: Kingma & Ba 2015, arXiv:1412.6980, algorithm 1, and the end of section 2 for
    tf; what it does to RLHF is in Huang et al. 2023, "The N Implementation Details of
    RLHF with PPO".
    """
    if not callable(learning_rate):
        checks.non_negative(learning_rate=learning_rate)
    checks.positive(eps=eps)
    for name, decay in {"b1": b1, "b2": b2}.items():
        if not 0 <= decay < 1:
            raise checks.InputError(
                f"{name}: expected a number from 0 to below 1, got {decay}; choose "
                f"0 <= {name} < 1"
            )
    match style:
        case "standard":
            scale = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
        case "tf":
            scale = _scale_by_tf_adam(b1=b1, b2=b2, eps=eps)
        case _:
            raise checks.InputError(
                f"style: expected 'standard' or 'tf', got {style!r}; choose one"
            )
    return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))


def _scale_by_tf_adam(
    *, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    moments = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        # What optax makes of the moments is left unread; the moments are its own.
        _, state = moments.update(updates, state, params)
        assert isinstance(state, optax.ScaleByAdamState)
        count = jnp.asarray(state.count, jnp.float32)
        correction = jnp.sqrt(_one_less_power(b2, count)) / _one_less_power(b1, count)
        step = jax.tree.map(
            lambda m, v: correction * m / (jnp.sqrt(v) + eps), state.mu, state.nu
        )
        return step, state

    return optax.GradientTransformation(moments.init, update)


def _one_less_power(decay: float, count: Array) -> Array:
    """1 - decay^count, without the cancellation of a decay near 1; f32[]."""
    if decay == 0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(count * math.log(decay))
