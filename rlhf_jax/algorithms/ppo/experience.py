"""Scored -> Experience: values, rewards per token, advantages and returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Experience, Rollout, RolloutPacking, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import masked, token_rewards
from rlhf_jax.functional.advantages import gae
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import Frozen

if TYPE_CHECKING:  # which hands this on
    from rlhf_jax.algorithms.ppo.recipe import PPO

Array = jax.Array
Params = Any
Whiten = Literal["rollout", "minibatch"] | None


def values(
    state: TrainState,
    *,
    rollout: Rollout,
    recipe: PPO,
    base: Frozen | None = None,
    packing: RolloutPacking | None = None,
) -> Array:
    """The critic's values of a rollout, which `learn` computes if they are not passed.

    As a program by itself it runs while the host computes the scores.

    Args:
      state: with a critic.
      rollout: Rollout[B, S].
      recipe: static.
      base: the parameters that adapters adapt; None without adapters.
      packing: how the critic reads the rollout packed; None reads it padded.

    Returns:
      f32[B, S], reward units; 0 where a state has no value.

    Raises:
      InputError: the state has no critic.
    """
    critic = recipe.critic_of(state, base=base)
    return score.response_values(
        critic.params,
        rollout=rollout,
        model=critic.model,
        max_new_tokens=recipe.max_new_tokens,
        after_stop=critic.after_stop,
        packing=None if packing is None else packing.batch,
    )


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

    Args:
      scored: Scored[B, S], with values.
      kl_coef: f32[], reward units per nat.
      gamma, lam: of GAE, dimensionless.
      whiten_rewards, whiten_advantages: "rollout" here, over all response tokens;
        "minibatch" leaves it to the update; None is off. Rewards keep their mean.
      whiten_ddof: of the variance, 0 (OAI, N+) or 1 (TRL).
      value_after_stop: the finished response has a value, and the score lands there.

    Returns:
      Experience[B, S]; `token_rewards` are those before whitening.

    Raises:
      InputError: there are no values to take advantages over.
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
      gamma, lam: of GAE, dimensionless.
      whiten_ddof: of the variance, 0 or 1.
      whiten_rewards: over these rows, without shifting their mean.
      whiten_advantages: over these rows, to mean 0.

    Returns:
      Experience[b, S]. Advantages are 0 outside the response, returns outside
      `value_mask`.
    """
    rewards = experience.token_rewards
    if whiten_rewards:
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
    advantages = jnp.where(mask, advantages, 0.0)
    if whiten_advantages:
        advantages = masked.masked_whiten(advantages, mask=mask, ddof=whiten_ddof)
    return dataclasses.replace(experience, advantages=advantages, returns=returns)
