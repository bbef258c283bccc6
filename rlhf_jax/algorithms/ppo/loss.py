"""The experience and the loss of PPO.

    Scored ─gae_experience─> Experience, whose rows the update divides into minibatches
    minibatch ─whitened─> ppo_loss = policy_terms + critic_loss

A critic that is trained apart (`critic_apart`) minimises `critic_loss` alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Experience, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.functional import losses, masked, token_rewards
from rlhf_jax.functional.advantages import gae
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.packing import Packing
from rlhf_jax.roles.critic import values, values_of_hidden
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, adapted_params

if TYPE_CHECKING:  # which imports this module
    from rlhf_jax.algorithms.ppo.recipe import PPO

Array = jax.Array
Params = Any

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
    """Computes token rewards from score and KL, and advantages by GAE.

    The options are those of `Recipe`: "rollout" whitens here, over all response tokens,
    and "minibatch" leaves it to the update. Whitened rewards keep their mean.

    Returns:
      Experience[B, S]; `token_rewards` are not whitened.

    Raises:
      InputError: the rollout has no values.
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
        # Computed by `estimate`, which a minibatch that whitens rewards calls again.
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
    """Computes advantages and returns from token rewards and old values.

    Args:
      experience: Experience[b, S], the whole rollout or a whole minibatch; its
        advantages and returns are not read.

    Returns:
      Experience[b, S]. Advantages are 0 outside the response, returns outside
      `value_mask`.
    """
    rewards = experience.token_rewards
    if whiten_rewards:
        # Without the shift, which would add a constant to every token's reward, and so
        # reward or penalise length.
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
    # In N+ the state after a finished response has a value, but draws no token.
    advantages = jnp.where(mask, advantages, 0.0)
    if whiten_advantages:
        # After GAE and returns, so that the critic's targets keep their unit.
        advantages = masked.masked_whiten(advantages, mask=mask, ddof=whiten_ddof)
    return dataclasses.replace(experience, advantages=advantages, returns=returns)


def whitened(minibatch: Experience, *, recipe: PPO) -> Experience:
    """Whitens rewards or advantages of a minibatch, if the recipe does so there."""
    # Whitened rewards have other advantages: GAE runs again over the minibatch.
    if recipe.whiten_rewards == "minibatch":
        return estimate(
            minibatch,
            gamma=recipe.gamma,
            lam=recipe.lam,
            whiten_rewards=True,
            whiten_advantages=recipe.whiten_advantages == "minibatch",
            whiten_ddof=recipe.whiten_ddof,
        )
    if recipe.whiten_advantages != "minibatch":
        return minibatch
    advantages = masked.masked_whiten(
        minibatch.advantages, mask=minibatch.response_mask, ddof=recipe.whiten_ddof
    )
    return dataclasses.replace(minibatch, advantages=advantages)


def ppo_loss(
    policy: Params,
    critic: Params,
    *,
    experience: Experience,
    kl_coef: Array | float,
    num_tokens: Array,
    num_values: Array,
    num_responses: Array,
    recipe: PPO,
    num_valued: Array | None = None,
    frozen: FrozenModels = NO_MODELS,
    packing: Packing | None = None,
) -> tuple[Array, masked.Stats]:
    """L = policy_loss + c_v·value_loss + β·kl_loss - c_H·entropy of a (micro-)batch.

    `policy_terms` has the options of the terms without the critic.

    Args:
      policy, critic: parameters, or adapters; the gradient reaches only these. With
        `recipe.shared_trunk` the critic is a head; None has no value loss, for a critic
        that is trained apart.
      num_tokens, num_values, num_responses: f32[], response tokens, states with a value
        and responses with a token, of the whole minibatch.
      num_valued: f32[], responses with a valued state, including responses that a
        correction rejects; None is num_responses.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    loss, stats, hidden, texts = policy_terms(
        policy,
        experience=experience,
        kl_coef=kl_coef,
        num_tokens=num_tokens,
        num_responses=num_responses,
        recipe=recipe,
        frozen=frozen,
        packing=packing,
    )
    if critic is None:
        return loss, stats
    counts = {
        "num_values": num_values,
        # A rejected response counts for the critic only.
        "num_valued": num_responses if num_valued is None else num_valued,
    }
    # No stop_gradient on the hidden states: both losses move the trunk, as in OAI.
    if recipe.shared_trunk:
        predicted = values_of_hidden(critic["score"], hidden, mask=texts.mask)
        added = _value_loss(
            texts.padded(predicted), experience=experience, recipe=recipe, **counts
        )
    else:
        added = critic_loss(
            critic,
            experience=experience,
            recipe=recipe,
            frozen=frozen,
            packing=packing,
            **counts,
        )
    return loss + added[0], stats | added[1]


def critic_loss(
    critic: Params,
    experience: Experience,
    *,
    num_values: Array,
    num_valued: Array,
    recipe: PPO,
    frozen: FrozenModels = NO_MODELS,
    packing: Packing | None = None,
) -> tuple[Array, masked.Stats]:
    """c_v·value_loss of a (micro-)batch, for a critic with its own trunk.

    Args:
      num_values, num_valued: f32[], states with a value and responses with such a
        state, of the whole minibatch.
    """
    predicted = values(
        adapted_params(critic, base=frozen.base, lora=recipe.lora),
        model=recipe.critic_model,
        tokens=experience.tokens,
        mask=experience.mask,
        first_column=experience.tokens.shape[1] - recipe.max_new_tokens,
        packing=packing,
    )
    return _value_loss(
        predicted,
        experience=experience,
        num_values=num_values,
        num_valued=num_valued,
        recipe=recipe,
    )


def _value_loss(
    predicted: Array,
    *,
    experience: Experience,
    num_values: Array,
    num_valued: Array,
    recipe: PPO,
) -> tuple[Array, masked.Stats]:
    loss, stats = losses.value_loss(
        values=predicted,
        old_values=experience.old_values,
        returns=experience.returns,
        mask=experience.value_mask,
        clip_range=recipe.value_clip_range,
        aggregation=recipe.aggregation,
        loss_scale_factor=recipe.loss_scale,
        # States with a value are the critic's tokens: in N+ one more per response.
        num_tokens=num_values,
        num_responses=num_valued,
    )
    return recipe.vf_coef * loss, stats
