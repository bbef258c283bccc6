"""Scored -> Experience: values, rewards per token, advantages and returns."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Experience, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.functional import masked, token_rewards
from rlhf_jax.functional.advantages import gae
from rlhf_jax.functional.checks import InputError

Array = jax.Array
Whiten = Literal["rollout", "minibatch"] | None


def gae_experience(
    scored: Scored,
    *,
    kl_coef: Array | float,
    gamma: float,
    lam: float,
    whiten_rewards: Whiten = None,
    whiten_advantages: Whiten = "rollout",
    whiten_ddof: int = 0,
    value_after_stop: bool = False,
) -> Experience:
    """Score and KL become token rewards; with the values, GAE makes them advantages.

    The options are those of `Recipe`: "rollout" whitens here, over all response tokens,
    and "minibatch" leaves it to the update. Rewards keep their mean.

    Returns:
      Experience[B, S]; `token_rewards` are those before whitening.
    """
    if scored.values is None:
        raise InputError(
            "expected a rollout scored by a critic, got one without values; pass "
            "critic to score, or take advantages over a group of responses instead"
        )
    mask = scored.rollout.response_mask
    value_mask = score.value_mask(scored.rollout, after_stop=value_after_stop)
    rewards = token_rewards.token_rewards(
        scores=scored.scores,
        kl=scored.kl,
        mask=mask,
        kl_coef=kl_coef,
        score_mask=value_mask,
        turn_rewards=scored.turn_rewards,
    )
    unestimated = Experience(
        tokens=scored.rollout.tokens,
        mask=scored.rollout.mask,
        response_mask=mask,
        value_mask=value_mask,
        old_logprobs=scored.rollout.old_logprobs,
        ref_logprobs=scored.ref_logprobs,
        old_values=scored.values,
        token_rewards=rewards,
        # Filled by `estimate`, which a minibatch may call again after whitening its
        # rewards.
        advantages=jnp.zeros_like(rewards),
        returns=jnp.zeros_like(rewards),
    )
    return estimate(
        unestimated,
        gamma=gamma,
        lam=lam,
        whiten_rewards=whiten_rewards == "rollout",
        whiten_advantages=whiten_advantages == "rollout",
        whiten_ddof=whiten_ddof,
    )


def estimate(
    experience: Experience,
    *,
    gamma: float,
    lam: float,
    whiten_rewards: bool,
    whiten_advantages: bool,
    whiten_ddof: int,
) -> Experience:
    """Advantages and returns from the token rewards and old values of these rows.

    Args:
      experience: Experience[b, S], the whole rollout or a whole minibatch; its
        advantages and returns are not read.

    Returns:
      Experience[b, S]. Advantages are 0 outside the response, returns outside
      `value_mask`.
    """
    rewards = experience.token_rewards
    if whiten_rewards:
        # Without the shift, which would pay or charge every token and so reward length.
        rewards = masked.masked_whiten(
            rewards, mask=experience.value_mask, shift_mean=False, ddof=whiten_ddof
        )
    advantages, returns = gae(
        rewards=rewards,
        values=experience.old_values,
        mask=experience.value_mask,
        gamma=gamma,
        lam=lam,
    )
    mask = experience.response_mask
    # In N+ the finished response is a state with a value, but no token is drawn there.
    advantages = jnp.where(mask, advantages, 0.0)
    if whiten_advantages:
        # After GAE and returns, so that the critic's targets keep their unit.
        advantages = masked.masked_whiten(advantages, mask=mask, ddof=whiten_ddof)
    return dataclasses.replace(experience, advantages=advantages, returns=returns)
