"""Rewards per token, from one score per response and one KL per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked

Array = jax.Array


def token_rewards(
    *,
    scores: Float32[Array, " B"],
    kl: Float32[Array, "B S"] | None,
    mask: Bool[Array, "B S"],
    kl_coef: checks.Scalar,
    score_mask: Bool[Array, "B S"] | None = None,
    turn_rewards: Float32[Array, "B S"] | None = None,
) -> Float32[Array, "B S"]:
    """r_t = -β·kl_t on every response token, plus the score on the last one.

        column     0    1    2    3    4    5
        tokens     ·   The  cat  sat  EOS   ·
        mask       0    0    1    1    1    0
        kl         ·    ·    2    1    3    ·
        rewards    0    0   -2β  -β  -3β+s  0

    In an episode of several turns, the reward of each earlier turn is on its last
    token, and the last token of the episode gets the rest of the score:

        mask            0    1    1    0    0    1    1
        turn_rewards    0    0    a    0    0    0    0
        rewards         0    0    a    0    0    0   s-a     without KL

    Args:
      scores: f32[B], reward units, one per response, or the sum over the turns of an
        episode.
      kl: f32[B, S], nats per token by any estimator; None is no penalty.
      kl_coef: β, f32[] or float, reward units per nat.
      score_mask: bool[B, S], the score is added at the last True of a row; None is
        `mask`. PPO in the variant N+ passes a mask that is one column longer.
      turn_rewards: f32[B, S], reward units of the turns before the last, which `scores`
        includes; not read outside the mask. None is a single turn.

    Returns:
      f32[B, S], reward units, 0 outside both masks. A row whose masks are empty has
      reward 0 everywhere: its score is not counted. The gradient reaches every float.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.

    >>> kl = jnp.array([[0.0, 0.0, 2.0, 1.0, 3.0, 0.0]])
    >>> mask = jnp.array([[False, False, True, True, True, False]])
    >>> scores = jnp.array([1.0])
    >>> print(token_rewards(scores=scores, kl=kl, mask=mask, kl_coef=0.5))
    [[ 0.   0.  -1.  -0.5 -0.5  0. ]]
    >>> print(token_rewards(scores=scores, kl=None, mask=mask, kl_coef=0.5))
    [[0. 0. 0. 0. 1. 0.]]
    """
    checks.shape((None, None), mask=mask)
    checks.boolean(mask=mask)
    checks.shape((mask.shape[0],), scores=scores)
    checks.float32(scores=scores)
    checks.non_negative(kl_coef=kl_coef)

    score_mask = mask if score_mask is None else score_mask
    checks.same_shape(score_mask=score_mask, mask=mask)
    checks.boolean(score_mask=score_mask)
    last = masked.last_true(score_mask)
    if turn_rewards is None:
        score_rewards = jnp.where(last, scores[:, None], 0.0)
    else:
        checks.masked_floats(mask, turn_rewards=turn_rewards)
        # The last token gets the rest, so the rewards of a row add up to its score.
        earlier = jnp.where(mask, turn_rewards, 0.0)
        rest = scores[:, None] - earlier.sum(axis=1, keepdims=True)
        score_rewards = earlier + jnp.where(last, rest, 0.0)
    if kl is None:
        return score_rewards
    checks.masked_floats(mask, kl=kl)
    # Select first: β · NaN of a masked token would reach GAE.
    return score_rewards - kl_coef * jnp.where(mask, kl, 0.0)


def kl_reward(
    kl: Float32[Array, "B S"],
    *,
    mask: Bool[Array, "B S"],
    kl_coef: checks.Scalar,
) -> Float32[Array, " B"]:
    """-β Σ_t kl_t: the part of a response's reward that `token_rewards` takes from KL.

    Args:
      kl: f32[B, S], nats per token.
      kl_coef: β, f32[] or float, reward units per nat.

    >>> kl = jnp.array([[0.0, 0.0, 2.0, 1.0, 3.0, 9.0]])
    >>> mask = jnp.array([[False, False, True, True, True, False]])
    >>> print(kl_reward(kl, mask=mask, kl_coef=0.5))
    [-3.]
    >>> print(kl_reward(kl, mask=mask, kl_coef=0.1))
    [-0.6]
    """
    checks.non_negative(kl_coef=kl_coef)
    return -kl_coef * masked.masked_sum(kl, mask=mask, axis=1)
