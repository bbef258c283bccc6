"""Where the sampler's policy is not the trainer's: its log-probs, and weights for them.

sampler, in int8 or older      draws a token with log μ
trainer                        recomputes its log-prob, log π_old
weight                         of π_old / μ, by default min(π_old / μ, cap)
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.loss import mean_distance
from rlhf_jax.functional import aggregation, masked
from rlhf_jax.models.packing import SizedPacking

if TYPE_CHECKING:
    from rlhf_jax.functional.off_policy.importance import Correction

Array = jax.Array
Params = Any
Experience = TypeVar("Experience", bound=PolicyExperience)


def recomputed(
    rollout: Rollout,
    params: Params,
    *,
    recipe: PolicyGradient,
    packing: SizedPacking | None,
) -> Rollout:
    """The trainer's log-probs as `old_logprobs`, if the recipe recomputes them."""
    if not recipe.recomputes_logprobs:
        return rollout
    return flow.rollout.recompute_logprobs(
        rollout,
        params,
        model=recipe.model,
        max_new_tokens=recipe.max_new_tokens,
        temperature=recipe.temperature,
        packing=packing,
    )


def corrected(
    experience: Experience, *, rollout: Rollout, step: Array, recipe: PolicyGradient
) -> tuple[Experience, masked.Stats]:
    """The experience, weighted for who drew its tokens where they are recomputed.

    Returns:
      The experience, and stats {name: (sum, weight)}: where log-probs are recomputed
      `policy/sampler_mismatch`, mean |log π_old - log μ| over the tokens that are
      trained on, nats per token; and those of `weighted` and `staleness`.
    """
    if not recipe.recomputes_logprobs:
        return experience, {}
    sampler_logprobs = rollout.behaviour_logprobs
    mismatch = mean_distance(
        experience.old_logprobs, sampler_logprobs, mask=experience.response_mask
    )
    compared: masked.Stats = {"policy/sampler_mismatch": mismatch}
    weights = recipe.weighted
    if weights is None:
        return experience, compared
    experience, stats = weighted(
        experience,
        sampler_logprobs=sampler_logprobs,
        cap=weights.cap,
        correction=weights.correction,
        floor=weights.floor,
        group_size=recipe.rows_per_prompt,
    )
    return experience, compared | stats | staleness(rollout, step=step)


def weighted(
    experience: Experience,
    *,
    sampler_logprobs: Array,
    cap: float,
    correction: Correction = "token_truncate",
    floor: float | None = None,
    group_size: int = 1,
) -> tuple[Experience, masked.Stats]:
    """The experience with advantages w·A, w the importance weights of a correction.

    As w >= 0, max(-ρ·wA, -clip(ρ)·wA) = w·max(-ρA, -clip(ρ)A), and as much holds for
    every surrogate: the policy's loss is weighted token by token. Returns, the value
    loss, the entropy bonus and a KL in the loss are not, but for the importance weights
    of the KL's own (`Penalty`), which are over the sampler too. A rejected response is
    left out of the policy loss, the entropy bonus and the KL in the loss, and of their
    divisors; the critic is still trained on it.

    Args:
      experience: PolicyExperience[B, S], whose `old_logprobs` are the trainer's.
      sampler_logprobs: f32[B, S], nats, log μ of the weights that drew the tokens.
      cap: C, the largest weight, dimensionless.
      correction: how weights beyond the bounds are cut (`importance.Correction`).
      floor: the smallest weight of the masks and of rejection; None is none.
    """
    # Few samplers are corrected for.
    from rlhf_jax.functional.off_policy import importance, mismatch

    mask = experience.response_mask
    pair = {
        "logprobs": experience.old_logprobs,
        "sampler_logprobs": sampler_logprobs,
        "mask": mask,
    }
    output = importance.importance_weights(
        **pair, correction=correction, cap=cap, floor=floor
    )
    stats = mismatch.weight_stats(output, mask=mask, correction=correction)
    stats |= mismatch.sampler_kl(**pair)
    changed: dict[str, Array] = {
        "advantages": output.weights * experience.advantages,
        "sampler_logprobs": sampler_logprobs,
    }
    if correction.endswith("_reject"):
        changed["response_mask"] = output.mask
        if experience.prompt_scale is not None:
            changed["prompt_scale"] = aggregation.prompt_scale(
                output.mask, group_size=group_size
            )
    return dataclasses.replace(experience, **changed), stats


def staleness(rollout: Rollout, *, step: Array) -> masked.Stats:
    """How old the parameters that drew the tokens are.

    Returns:
      {name: (sum, weight)}: `policy/staleness`, step - version, mean over the response
      tokens, iterations, and `policy/staleness_max`, the largest; nothing where no
      version is known.
    """
    if rollout.version is None:
        return {}
    age = (step - rollout.version).astype(jnp.float32)
    mask = rollout.response_mask
    oldest = jnp.max(age, where=mask, initial=0.0)
    return masked.sum_stats({"policy/staleness": age}, mask=mask) | {
        "policy/staleness_max": (oldest, None)
    }
