"""Rollout -> Scored: adds scores, reference log-probs, KL and values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Rollout, Scored
from rlhf_jax.algorithms.flow.rollout import response_logprobs
from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty, reward_kl
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.packing import Packing, SizedPacking, at_size, texts_of
from rlhf_jax.roles import critic
from rlhf_jax.roles.policy import exact_kl, logprobs_from_hidden
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params

Array = jax.Array
Params = Any


def score(
    rollout: Rollout,
    *,
    scores: Array,
    reference: Frozen | None,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    penalty: Penalty = IN_REWARD,
    policy: Params | None = None,
    ref_logprobs: Array | None = None,
    values: Array | None = None,
    packing: SizedPacking | None = None,
    turn_rewards: Array | None = None,
    row_mask: Array | None = None,
    replays: bool = False,
) -> Scored:
    """Adds values, reference log-probs and the KL to a rollout, before the epochs.

    Args:
      scores: f32[B], reward units, one per response.
      reference: None, without `ref_logprobs`, leaves `ref_logprobs` and `kl` None.
      penalty: the KL in the reward is computed here. With placement None it is only
        measured (`kl_stats`).
      policy: parameters of the policy, read for an exact KL in the reward, which needs
        the hidden states of both models (`Penalty.reward_needs_logits`).
      ref_logprobs: f32[B, S], nats, if `reference_logprobs` ran before, as on devices
        of its own; `reference` is then run for exact KL only.
      values: f32[B, S], reward units, of `response_values`; None without a critic.
      row_mask: bool[B], responses that have a score; None is all.
      replays: as in `reference_logprobs`.

    Returns:
      Scored[B, S]; every per-token array is 0 outside the response.

    Raises:
      ValueError: scores is not one number per row. InputError: exact KL lacks `policy`
        or `reference`.
    """
    checks.shape((rollout.tokens.shape[0],), scores=scores)
    checks.float32(scores=scores)
    mask = rollout.response_mask
    reading: dict[str, Any] = {
        "rollout": rollout,
        "model": model,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "packing": packing,
        "replays": replays,
    }
    kl, kl_stats, exact = None, {}, None
    # A reference on devices of its own has log-probs here, but no parameters.
    measured = reference is not None or ref_logprobs is not None
    # With placement None the KL is measured as if it were in the reward.
    estimated = penalty.in_reward or penalty.placement is None
    if measured and estimated and penalty.reward_needs_logits:
        exact, exact_ref_logprobs = _exact_kl(
            reference, policy=policy, penalty=penalty, **reading
        )
        if ref_logprobs is None:
            ref_logprobs = exact_ref_logprobs
    # Exact KL has already run the reference.
    if reference is not None and ref_logprobs is None:
        ref_logprobs = reference_logprobs(reference, **reading)
    if ref_logprobs is not None and estimated:
        estimate, kl_stats = reward_kl(
            penalty=penalty,
            logprobs=rollout.old_logprobs,
            ref_logprobs=ref_logprobs,
            mask=mask,
            exact=exact,
        )
        kl = estimate if penalty.in_reward else None
        # `objective/kl_exact` is the reverse KL over all tokens, and no other.
        if exact is not None and penalty.direction == "reverse" and not penalty.top_k:
            rows = num_responses(mask, row_mask=row_mask)
            kl_stats |= {"objective/kl_exact": (exact.sum(), rows)}
    return Scored(
        rollout=rollout,
        scores=scores,
        values=values,
        ref_logprobs=ref_logprobs,
        kl=kl,
        kl_stats=kl_stats,
        turn_rewards=turn_rewards,
        row_mask=row_mask,
    )


def _exact_kl(
    reference: Frozen | None,
    *,
    policy: Params | None,
    rollout: Rollout,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    penalty: Penalty,
    packing: SizedPacking | None,
    replays: bool,
) -> tuple[Array, Array]:
    """Exact KL and the reference's log-probs, from one forward pass of each model."""
    if policy is None or reference is None:
        missing = "policy" if policy is None else "reference"
        raise InputError(
            f"expected policy and reference for exact KL, got no {missing}: it needs "
            f"the hidden states of both, log-probs of the sampled tokens are not "
            f"enough. Run the reference beside the policy, or choose k1, k2 or k3"
        )
    with jax.named_scope("reference"):
        ref_params = frozen.read(reference)
    ref_model = frozen.shape_of(reference, policy=model)

    def compute(packing: Packing | None) -> tuple[Array, Array]:
        texts = texts_of(
            rollout.tokens,
            rollout.mask,
            first_column=rollout.tokens.shape[1] - max_new_tokens,
            packing=packing,
        )
        experts = rollout.experts
        hidden = texts.hidden_states(policy, model=model, experts=experts)
        experts = experts if replays else None
        with jax.named_scope("reference"):
            ref_hidden = texts.hidden_states(
                ref_params, model=ref_model, experts=experts
            )
        exact = exact_kl(
            policy,
            hidden,
            ref_params,
            ref_hidden,
            texts=texts,
            model=model,
            ref_model=ref_model,
            temperature=temperature,
            direction=penalty.direction,
            top_k=penalty.top_k,
        )
        with jax.named_scope("reference"):
            ref_logprobs, _ = logprobs_from_hidden(
                ref_params,
                ref_hidden,
                texts=texts,
                model=ref_model,
                temperature=temperature,
            )
        return texts.padded(exact), texts.padded(ref_logprobs)

    exact, ref_logprobs = at_size(packing, compute)
    mask = rollout.response_mask
    return jnp.where(mask, exact, 0.0), jnp.where(mask, ref_logprobs, 0.0)


def value_mask(rollout: Rollout, *, after_stop: bool) -> Array:
    """bool[B, S]: the states that have a value.

        column          0    1    2    3    4    5
        tokens          ·   The  cat  sat  EOS   ·
        response_mask   0    0    1    1    1    0
        after_stop      0    0    1    1    1    1

    In an episode of several turns only the last turn has a state after it: after the
    others the next turn begins.

    Args:
      after_stop: count the finished response as a state, if a column is left for it;
        the score is then placed there (N+).

    Source: `padding_mask_p1` of summarize_from_feedback_details (Huang et al. 2024).
    """
    mask = rollout.response_mask
    if not after_stop:
        return mask
    # A full row has no column left: its score is placed on the last token.
    return mask | jnp.pad(masked.last_true(mask)[:, :-1], ((0, 0), (1, 0)))


def num_responses(mask: Array, *, row_mask: Array | None) -> Array:
    """f32[]: number of responses of a batch that count."""
    if row_mask is None:
        return jnp.asarray(mask.shape[0], jnp.float32)
    return row_mask.sum(dtype=jnp.float32)


@jax.named_scope("values")
def response_values(
    params: Params,
    *,
    rollout: Rollout,
    model: ModelConfig,
    max_new_tokens: int,
    after_stop: bool,
    packing: SizedPacking | None = None,
) -> Array:
    """V of the states of a response, f32[B, S], reward units; 0 elsewhere.

    Args:
      after_stop: whether the state after the last token has a value.
    """

    def compute(packing: Packing | None) -> Array:
        return critic.values(
            params,
            model=model,
            tokens=rollout.tokens,
            mask=rollout.mask,
            first_column=rollout.tokens.shape[1] - max_new_tokens,
            packing=packing,
        )

    # The critic computes a number at every column; keep those of states.
    values = at_size(packing, compute)
    return jnp.where(value_mask(rollout, after_stop=after_stop), values, 0.0)


@jax.named_scope("reference")
def reference_logprobs(
    reference: Frozen,
    *,
    rollout: Rollout,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    base: Frozen | None = None,
    lora: LoRA | None = None,
    packing: SizedPacking | None = None,
    replays: bool = False,
) -> Array:
    """log π_ref of the response tokens, once per rollout, before the epochs.

    `score` calls it. A reference on devices of its own runs it as a separate program
    (`frozen.beside` moves the rollout there).

    Args:
      reference: in any storage and of any shape (`Frozen.model`).
      base, lora: if the reference is adapters, else None (`adapted_params`).
      replays: route the reference's tokens to the rollout's experts, too.

    Returns:
      f32[B, S], nats; 0 outside the response. No gradient reaches the reference.
    """
    if not replays:
        rollout = dataclasses.replace(rollout, experts=None)
    return response_logprobs(
        adapted_params(frozen.read(reference), base=base, lora=lora),
        rollout=rollout,
        model=frozen.shape_of(reference, policy=model),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        packing=packing,
    )


def ended(rollout: Rollout, *, stop_ids: tuple[int, ...]) -> Array:
    """bool[B]: the response's last token is a stop token."""
    stops = jnp.isin(rollout.tokens, jnp.asarray(stop_ids, jnp.int32))
    return (stops & masked.last_true(rollout.response_mask)).any(axis=1)
