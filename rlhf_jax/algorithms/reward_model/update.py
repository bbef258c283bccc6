"""Reward-model training: Preferences -> SupervisedState."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Preferences
from rlhf_jax.algorithms.state import Optimizer, SupervisedState, supervised_update
from rlhf_jax.functional import checks, losses, masked
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any


def loss(
    params: Params, batch: Preferences, *, model: ModelConfig, num_pairs: Array
) -> tuple[Array, masked.Stats]:
    """Bradley-Terry loss of the pairs, from one forward pass over both responses.

    Args:
      batch: Preferences[b, S], both sides padded to one width.
      num_pairs: f32[], pairs in the whole batch.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4.
    """
    checks.same_shape(chosen=batch.chosen.tokens, rejected=batch.rejected.tokens)
    # [2b, S]: one forward pass with larger matrix products, instead of two.
    both = jax.tree.map(
        lambda chosen, rejected: jnp.concatenate([chosen, rejected]),
        batch.chosen,
        batch.rejected,
    )
    scores = rewards.sequence_scores(
        params, model=model, tokens=both.tokens, mask=both.mask
    )
    chosen, rejected = jnp.split(scores, 2)
    return losses.pairwise_loss(
        chosen=chosen, rejected=rejected, margin=batch.margin, num_pairs=num_pairs
    )


def update(
    state: SupervisedState,
    *,
    batch: Preferences,
    model: ModelConfig,
    optimizer: Optimizer,
    micro_batch_size: int | None = None,
    base: Frozen | None = None,
    lora: LoRA | None = None,
) -> tuple[SupervisedState, masked.Stats]:
    """One optimizer step (`state.supervised_update`)."""
    num_pairs = jnp.asarray(batch.chosen.tokens.shape[0], jnp.float32)
    return supervised_update(
        state,
        batch=batch,
        loss=functools.partial(loss, model=model, num_pairs=num_pairs),
        optimizer=optimizer,
        micro_batch_size=micro_batch_size,
        base=base,
        lora=lora,
    )
