"""What an update of PPO minimises, for the rows of a minibatch or a part of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import kl_penalty, losses, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder
from rlhf_jax.roles import adapted, frozen
from rlhf_jax.roles import critic as critic_
from rlhf_jax.roles import policy as policy_
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.stages.batch import Experience
from rlhf_jax.stages.ppo_config import PPO

Array = jax.Array
Params = Any


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
        and nothing else. With `ppo.shared_trunk` the critic is a head alone.
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
    mask = experience.response_mask
    first_column = experience.tokens.shape[1] - ppo.max_new_tokens
    params = adapted.params(policy, base=base, lora=ppo.lora)
    hidden = decoder.hidden_states(
        params, model=ppo.model, tokens=experience.tokens, mask=experience.mask
    )
    logprobs, entropy = policy_.price_hidden(
        params,
        hidden,
        model=ppo.model,
        tokens=experience.tokens,
        mask=experience.mask,
        temperature=ppo.temperature,
        first_column=first_column,
    )
    loss, stats = losses.policy_loss(
        logprobs=logprobs,
        old_logprobs=experience.old_logprobs,
        advantages=experience.advantages,
        mask=mask,
        clip_range=ppo.clip_range,
        clip_range_high=ppo.clip_range_high,
        dual_clip=ppo.dual_clip,
        aggregation=ppo.aggregation,
        num_tokens=num_tokens,
        num_responses=num_responses,
    )
    stats["policy/sampler_mismatch"] = mean_distance(
        jax.lax.stop_gradient(logprobs), experience.old_logprobs, mask=mask
    )
    if ppo.shared_trunk:
        values = critic_.values_of_hidden(critic["score"], hidden, mask=experience.mask)
    else:
        values = critic_.values(
            adapted.params(critic, base=base, lora=ppo.lora),
            model=ppo.critic_model,
            tokens=experience.tokens,
            mask=experience.mask,
        )
    value_loss, value_stats = losses.value_loss(
        values=values,
        old_values=experience.old_values,
        returns=experience.returns,
        mask=experience.value_mask,
        clip_range=ppo.value_clip_range,
        aggregation=ppo.aggregation,
        num_tokens=num_values,
        num_responses=num_responses,
    )
    loss, stats = loss + ppo.vf_coef * value_loss, stats | value_stats
    if ppo.entropy_coef:
        bonus, bonus_stats = losses.entropy_bonus(
            entropy=entropy,
            mask=mask,
            aggregation=ppo.aggregation,
            num_tokens=num_tokens,
            num_responses=num_responses,
        )
        loss, stats = loss + ppo.entropy_coef * bonus, stats | bonus_stats
    if ppo.penalty.in_loss and experience.ref_logprobs is not None:
        exact = None
        if ppo.penalty.loss_needs_logits:
            exact = _exact_kl(
                params, hidden, experience=experience, reference=reference, ppo=ppo
            )
        kl_loss, kl_stats = kl_penalty.kl_loss(
            penalty=ppo.penalty,
            logprobs=logprobs,
            old_logprobs=experience.old_logprobs,
            ref_logprobs=experience.ref_logprobs,
            mask=mask,
            weights=losses.token_weights(
                mask,
                aggregation=ppo.aggregation,
                num_tokens=num_tokens,
                num_responses=num_responses,
            ),
            exact=exact,
        )
        loss, stats = loss + kl_coef * kl_loss, stats | kl_stats
    return loss, stats


def _exact_kl(
    params: Params,
    hidden: Array,
    *,
    experience: Experience,
    reference: Frozen | None,
    ppo: PPO,
) -> Array:
    if reference is None:
        raise InputError(
            "expected the reference itself for exact KL in the loss, got log-probs "
            "alone; pass reference to update, or choose k1, k2 or k3"
        )
    ref_params = frozen.read(reference)
    ref_hidden = decoder.hidden_states(
        ref_params, model=ppo.model, tokens=experience.tokens, mask=experience.mask
    )
    return policy_.exact_kl(
        params,
        hidden,
        ref_params,
        ref_hidden,
        model=ppo.model,
        mask=experience.mask,
        temperature=ppo.temperature,
        first_column=experience.tokens.shape[1] - ppo.max_new_tokens,
        direction=ppo.penalty.direction,
        top_k=ppo.penalty.top_k,
    )


def mean_distance(left: Array, right: Array, *, mask: Array) -> tuple[Array, Array]:
    """(Σ m·|left - right|, Σ m), nats per token for log-probs.

    Args:
      left, right: f32[B, S].
      mask: bool[B, S].
    """
    distance = masked.masked_sum(jnp.abs(left - right), mask=mask)
    return distance, mask.sum(dtype=jnp.float32)
