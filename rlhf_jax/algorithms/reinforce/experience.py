"""Scored -> PolicyExperience: the advantage of a token is its reward to go."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.functional import masked, token_rewards

Array = jax.Array


def reward_to_go_experience(
    scored: Scored, *, kl_coef: Array | float, whiten_advantages: bool
) -> PolicyExperience:
    """A_t = Σ_{s >= t} r_s, with r the token rewards: the score and -β·KL.

    In an episode of several turns, A_t excludes the rewards of turns that end before t.
    β acts in the token rewards here; in the loss it acts in `policy_terms`.

    Args:
      scored: Scored[B, S]; `kl` is None where the reward has no KL.
      kl_coef: β, f32[] or float, reward units per nat.
      whiten_advantages: to mean 0 and variance 1 over all response tokens.

    Returns:
      PolicyExperience[B, S]; advantages in reward units, or in standard deviations if
      whitened, 0 outside the response.

    Source: Hu 2025, arXiv:2501.03262 (REINFORCE++).
    """
    mask = scored.rollout.response_mask
    rewards = token_rewards.token_rewards(
        scores=scored.scores,
        kl=scored.kl,
        mask=mask,
        kl_coef=kl_coef,
        turn_rewards=scored.turn_rewards,
    )
    # A cumulative sum from the right.
    advantages = jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    # The sum is not 0 in the prompt's columns.
    advantages = jnp.where(mask, advantages, 0.0)
    if whiten_advantages:
        advantages = masked.masked_whiten(advantages, mask=mask)
    return PolicyExperience(
        tokens=scored.rollout.tokens,
        mask=scored.rollout.mask,
        response_mask=mask,
        old_logprobs=scored.rollout.old_logprobs,
        ref_logprobs=scored.ref_logprobs,
        token_rewards=rewards,
        advantages=advantages,
    )
