"""Where the sampler's policy is not the trainer's: its log-probs, and weights for them.

sampler, in int8      draws a token with log μ
trainer               recomputes its log-prob, log π_old
weight                min(π_old / μ, cap), and 1 outside the response
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.loss import mean_distance
from rlhf_jax.functional import masked
from rlhf_jax.models.packing import SizedPacking

Array = jax.Array
Params = Any
Experience = TypeVar("Experience", bound=PolicyExperience)


def recomputed(
    rollout: Rollout,
    params: Params,
    *,
    recipe: PolicyGradient,
    packing: SizedPacking | None,
) -> tuple[Rollout, masked.Stats]:
    """The rollout with the trainer's log-probs as `old_logprobs`.

    Args:
      rollout: Rollout[B, S], with the sampler's log-probs.
      params: of the policy, before any update.
      recipe: of `iteration`.
      packing: how the model reads these rows packed; None reads them padded.

    Returns:
      The rollout, and `policy/sampler_mismatch`, mean |log π_old - log μ| over the
      response tokens, nats per token, as (sum, weight).
    """
    after = flow.rollout.recompute_logprobs(
        rollout,
        params,
        model=recipe.model,
        max_new_tokens=recipe.max_new_tokens,
        temperature=recipe.temperature,
        packing=packing,
    )
    mismatch = mean_distance(
        after.old_logprobs, rollout.old_logprobs, mask=after.response_mask
    )
    return after, {"policy/sampler_mismatch": mismatch}


def weighted(
    experience: Experience, *, sampler_logprobs: Array, cap: float
) -> tuple[Experience, masked.Stats]:
    """The experience with advantages w·A, w = min(exp(log π_old - log μ), cap).

    As w >= 0, max(-ρ·wA, -clip(ρ)·wA) = w·max(-ρA, -clip(ρ)A): the policy's loss is
    weighted token by token. Returns, the value loss, the entropy bonus and a KL in the
    loss are not.

    Args:
      experience: PolicyExperience[B, S], whose `old_logprobs` are the trainer's.
      sampler_logprobs: f32[B, S], nats, log μ of the weights that drew the tokens.
      cap: C >= 1, dimensionless.

    Returns:
      The experience, and {name: (sum, weight)}: `policy/sampler_weight` is the mean of
      w, `policy/sampler_weight_capped` the share of tokens whose w is the cap.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training" (truncated importance sampling).
    """
    mask = experience.response_mask
    log_cap = jnp.log(jnp.float32(cap))
    distance = jnp.where(mask, experience.old_logprobs - sampler_logprobs, 0.0)
    weights = jnp.exp(jnp.minimum(distance, log_cap))
    count = mask.sum(dtype=jnp.float32)
    stats: masked.Stats = {
        "policy/sampler_weight": (masked.masked_sum(weights, mask=mask), count),
        "policy/sampler_weight_capped": (
            (mask & (distance >= log_cap)).sum(dtype=jnp.float32),
            count,
        ),
    }
    advantages = weights * experience.advantages
    return dataclasses.replace(experience, advantages=advantages), stats
