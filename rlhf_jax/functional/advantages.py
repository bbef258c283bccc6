"""Advantages: how much better an action was than the critic expected."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks

Array = jax.Array


def gae(
    *, rewards: Array, values: Array, mask: Array, gamma: float, lam: float
) -> tuple[Array, Array]:
    """Generalised advantages A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} - V_t.

    values[:, t] is the value of the state just before tokens[:, t]; the response's
    end is the end of the episode, so the value after its last token is 0:

        column       0    1    2    3    4    5
        tokens       ·   The  cat  sat  EOS   ·
        mask         0    0    1    1    1    0
        δ_2 = r_2 + γ·V_3 - V_2        δ_4 = r_4 - V_4

    Args:
      rewards: f32[B, S], reward units.
      values: f32[B, S], reward units.
      mask: bool[B, S], response tokens, EOS included: one run of True in each row.
      gamma: γ, discount per token, dimensionless.
      lam: λ, 0 is one-step TD, 1 is the discounted return minus the value.

    Returns:
      f32[B, S] advantages and f32[B, S] returns (advantages + values), reward units,
      both 0 outside the mask.

    Raises:
      ValueError: shapes differ. TypeError: floats are not f32 or mask is not bool.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.
    """
    checks.shape((None, None), rewards=rewards)
    checks.same_shape(rewards=rewards, values=values, mask=mask)
    checks.float32(rewards=rewards, values=values)
    checks.boolean(mask=mask)

    values = jnp.where(mask, values, 0.0)
    next_values = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    deltas = jnp.where(mask, rewards, 0.0) + gamma * next_values - values

    def step(next_advantage: Array, column: tuple[Array, Array]):
        delta, inside = column
        advantage = jnp.where(inside, delta + gamma * lam * next_advantage, 0.0)
        return advantage, advantage

    end = jnp.zeros_like(deltas[:, 0])
    _, advantages = jax.lax.scan(step, end, (deltas.T, mask.T), reverse=True)
    return advantages.T, advantages.T + values
