"""Rollout -> Scored: what the reward, the reference and the critic say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional import kl as kl_
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import adapted, frozen
from rlhf_jax.roles import critic as critic_
from rlhf_jax.roles import policy as policy_
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.stages.batch import Rollout, Scored

Array = jax.Array
Params = Any


def score(
    rollout: Rollout,
    *,
    scores: Array,
    reference: Frozen | None,
    model: ModelConfig,
    critic: Params | None,
    critic_model: ModelConfig | None,
    max_new_tokens: int,
    temperature: float,
    kl_estimator: Callable[[Array, Array], Array] = kl_.k1,
    ref_logprobs: Array | None = None,
) -> Scored:
    """Prices a rollout with the frozen models, once, before the epochs.

    Args:
      rollout: Rollout[B, S].
      scores: f32[B], reward units, one a response.
      reference: None is never run, and leaves `ref_logprobs` and `kl` None.
      model: shape of the policy and so of the reference.
      critic, critic_model: None leaves `values` None.
      max_new_tokens: R, the response columns; the others are not priced.
      temperature: the rollout's.
      kl_estimator: per-token KL from (logprobs, ref_logprobs), for the reward.
      ref_logprobs: f32[B, S], nats, where `reference_logprobs` ran before, on devices
        of its own; it then is what the KL is taken to, and `reference` is not run.

    Returns:
      Scored[B, S]; every per-token array is 0 outside the response.

    Raises:
      ValueError: scores is not one number a row, or the critic has no shape.
      TypeError: scores is not f32.
    """
    checks.shape((rollout.tokens.shape[0],), scores=scores)
    checks.float32(scores=scores)
    kl = values = None
    if reference is not None and ref_logprobs is None:
        ref_logprobs = reference_logprobs(
            reference,
            rollout=rollout,
            model=model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
    if ref_logprobs is not None:
        kl = kl_estimator(rollout.old_logprobs, ref_logprobs)
    if critic is not None:
        if critic_model is None:
            raise InputError("expected the critic's shape with the critic, got None")
        values = critic_.values(
            critic, model=critic_model, tokens=rollout.tokens, mask=rollout.mask
        )
        values = jnp.where(rollout.response_mask, values, 0.0)
    return Scored(
        rollout=rollout,
        scores=scores,
        values=values,
        ref_logprobs=ref_logprobs,
        kl=kl,
    )


def reference_logprobs(
    reference: Frozen,
    *,
    rollout: Rollout,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    base: Frozen | None = None,
    lora: LoRA | None = None,
) -> Array:
    """log π_ref of the response tokens, once a rollout, before the epochs.

    It is `score`'s own step, and a program by itself where the reference has devices
    of its own (`frozen.beside` takes the rollout there).

    Args:
      reference: the frozen policy, however it is stored.
      rollout: Rollout[B, S].
      model: shape of the policy and so of the reference.
      max_new_tokens: R, the response columns; the others are not priced.
      temperature: the rollout's.
      base, lora: where the reference is adapters, else None (`adapted.params`).

    Returns:
      f32[B, S], nats; 0 outside the response. No gradient reaches the reference.
    """
    priced = policy_.logprobs(
        adapted.params(frozen.read(reference), base=base, lora=lora),
        model=model,
        tokens=rollout.tokens,
        mask=rollout.mask,
        temperature=temperature,
        first_column=rollout.tokens.shape[1] - max_new_tokens,
    )
    return jnp.where(rollout.response_mask, priced, 0.0)


def penalise_missing_stop(
    scores: Array, *, rollout: Rollout, stop_ids: tuple[int, ...], score: float
) -> Array:
    """The score of a response that never stopped is replaced (the "EOS trick").

    Args:
      scores: f32[B], reward units.
      rollout: Rollout[B, S].
      stop_ids: tokens that end a response.
      score: reward units; -1 in N+.

    Returns:
      f32[B].

    Source: Huang et al. 2024, arXiv:2403.17031, detail 7.
    """
    return jnp.where(ended(rollout, stop_ids=stop_ids), scores, score)


def ended(rollout: Rollout, *, stop_ids: tuple[int, ...]) -> Array:
    """bool[B]: the response holds a stop token."""
    stops = jnp.isin(rollout.tokens, jnp.asarray(stop_ids, jnp.int32))
    return (stops & rollout.response_mask).any(axis=1)
