"""What an update of PPO minimises, for the rows of a minibatch or a part of them.

    minibatch ─whitened─> ppo_loss = policy_terms + critic_loss

A critic that is trained apart (`critic_apart`) minimises `critic_loss` alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rlhf_jax.algorithms.batch import Experience
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.algorithms.ppo.experience import estimate
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.functional import losses, masked
from rlhf_jax.roles import adapted
from rlhf_jax.roles import critic as critic_
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any


def whitened(minibatch: Experience, *, ppo: PPO) -> Experience:
    """A whole minibatch as `ppo` whitens it: rewards (and so GAE again), advantages.

    Nothing is done with what is whitened over the rollout, or not at all.
    """
    if ppo.whiten_rewards == "minibatch":
        return estimate(
            minibatch,
            gamma=ppo.gamma,
            lam=ppo.lam,
            whiten_rewards=True,
            whiten_advantages=ppo.whiten_advantages == "minibatch",
            whiten_ddof=ppo.whiten_ddof,
        )
    if ppo.whiten_advantages != "minibatch":
        return minibatch
    advantages = masked.masked_whiten(
        minibatch.advantages, mask=minibatch.response_mask, ddof=ppo.whiten_ddof
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
    ppo: PPO,
    base: Frozen | None = None,
    reference: Frozen | None = None,
) -> tuple[Array, masked.Stats]:
    """L = policy_loss + c_v·value_loss + β·kl_loss - c_H·entropy of a (micro-)batch.

    β·kl_loss is there with a penalty in the loss (`ppo.penalty`), the entropy with
    `ppo.entropy_coef`.

    Args:
      policy, critic: parameters, or adapters of `base`; the gradient reaches both,
        and nothing else. With `ppo.shared_trunk` the critic is a head alone; None is
        a critic that is trained apart, and no value loss.
      experience: Experience[b, S].
      kl_coef: β, f32[], reward units per nat; read where the KL is in the loss.
      num_tokens, num_values, num_responses: f32[], response tokens, valued states and
        responses that hold a token, all of the whole minibatch.
      ppo: static.
      base: as `ppo.iteration`.
      reference: read for exact KL in the loss alone; no gradient reaches it.

    Returns:
      f32[] and the stats of the losses and `policy/sampler_mismatch`.

    Raises:
      ValueError: there are no columns before the `max_new_tokens` of the response.
      InputError: exact KL without a reference, or as `adapted.params`.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    loss, stats, hidden = policy_terms(
        policy,
        experience=experience,
        kl_coef=kl_coef,
        num_tokens=num_tokens,
        num_responses=num_responses,
        algorithm=ppo,
        base=base,
        reference=reference,
    )
    if critic is None:
        return loss, stats
    counts = {"num_values": num_values, "num_responses": num_responses}
    if ppo.shared_trunk:
        values = critic_.values_of_hidden(critic["score"], hidden, mask=experience.mask)
        added = _value_loss(values, experience=experience, ppo=ppo, **counts)
    else:
        added = critic_loss(critic, experience=experience, ppo=ppo, base=base, **counts)
    return loss + added[0], stats | added[1]


def critic_loss(
    critic: Params,
    *,
    experience: Experience,
    num_values: Array,
    num_responses: Array,
    ppo: PPO,
    base: Frozen | None = None,
) -> tuple[Array, masked.Stats]:
    """c_v·value_loss of a (micro-)batch, by a critic with a trunk of its own.

    Args, Returns, Raises: as `ppo_loss`.
    """
    values = critic_.values(
        adapted.params(critic, base=base, lora=ppo.lora),
        model=ppo.critic_model,
        tokens=experience.tokens,
        mask=experience.mask,
        first_column=experience.tokens.shape[1] - ppo.max_new_tokens,
    )
    return _value_loss(
        values,
        experience=experience,
        num_values=num_values,
        num_responses=num_responses,
        ppo=ppo,
    )


def _value_loss(
    values: Array,
    *,
    experience: Experience,
    num_values: Array,
    num_responses: Array,
    ppo: PPO,
) -> tuple[Array, masked.Stats]:
    loss, stats = losses.value_loss(
        values=values,
        old_values=experience.old_values,
        returns=experience.returns,
        mask=experience.value_mask,
        clip_range=ppo.value_clip_range,
        aggregation=ppo.aggregation,
        loss_scale_factor=ppo.loss_scale,
        num_tokens=num_values,
        num_responses=num_responses,
    )
    return ppo.vf_coef * loss, stats
