"""Supervised fine-tuning: Sequences -> SupervisedState."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.algorithms.state import Optimizer, SupervisedState, supervised_update
from rlhf_jax.functional import losses, masked
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import policy
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any


def loss(
    params: Params, batch: Sequences, *, model: ModelConfig, num_tokens: Array
) -> tuple[Array, masked.Stats]:
    """Cross-entropy of the tokens trained on, nats per token, at temperature 1.

    Args:
      num_tokens: f32[], tokens trained on (`predicted`) in the whole batch.
    """
    logprobs = policy.logprobs(
        params,
        model=model,
        tokens=batch.tokens,
        mask=batch.mask,
        segments=batch.segments,
    )
    return losses.language_model_loss(
        logprobs=logprobs, mask=predicted(batch), num_tokens=num_tokens
    )


def predicted(batch: Sequences) -> Array:
    """bool[B, S]: response tokens except a text's first, which nothing predicts."""
    text = batch.mask if batch.segments is None else batch.segments
    before = jnp.pad(text[:, :-1], ((0, 0), (1, 0)))
    # The first token of a packed text follows another text, which does not predict it.
    return batch.response_mask & (text == before)


def update(
    state: SupervisedState,
    *,
    batch: Sequences,
    model: ModelConfig,
    optimizer: Optimizer,
    micro_batch_size: int | None = None,
    base: Frozen | None = None,
    lora: LoRA | None = None,
) -> tuple[SupervisedState, masked.Stats]:
    """One optimizer step (`state.supervised_update`)."""
    # Over the whole batch: micro-batches with unequal token counts add up to one mean.
    num_tokens = predicted(batch).sum(dtype=jnp.float32)
    return supervised_update(
        state,
        batch=batch,
        loss=functools.partial(loss, model=model, num_tokens=num_tokens),
        optimizer=optimizer,
        micro_batch_size=micro_batch_size,
        base=base,
        lora=lora,
    )
