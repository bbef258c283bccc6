"""Weights for tokens that other weights than the trainer's drew.

sampler, in int8      draws a token with log μ
trainer               recomputes its log-prob, log π_old
weight                min(π_old / μ, cap), and 1 outside the response
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience
from rlhf_jax.functional import masked

Array = jax.Array
Experience = TypeVar("Experience", bound=PolicyExperience)


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
