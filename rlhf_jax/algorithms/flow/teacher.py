"""What a student reads of its teacher: hidden states of its samples, and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import ReferenceOutput, Rollout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles.policy import logprobs_from_hidden
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array


@jax.named_scope("reference")
def teacher_states(
    teacher: Frozen,
    *,
    rollout: Rollout,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
) -> ReferenceOutput:
    """One forward pass of the teacher over the student's samples."""
    params = frozen.read(teacher)
    model = frozen.shape_of(teacher, policy=model)
    first_column = rollout.tokens.shape[1] - max_new_tokens
    texts = texts_of(
        rollout.tokens, rollout.mask, first_column=first_column, packing=None
    )
    hidden = texts.hidden_states(params, model=model)
    logprobs, _ = logprobs_from_hidden(
        params,
        hidden,
        model=model,
        tokens=rollout.tokens,
        mask=rollout.mask,
        temperature=temperature,
        first_column=first_column,
    )
    return ReferenceOutput(jnp.where(rollout.response_mask, logprobs, 0.0), hidden)


def head_of(
    teacher: Frozen, *, model: ModelConfig, place: Callable[[Any], Any]
) -> Frozen:
    """A copy of the teacher's head, as it is stored, for the devices of the student.

    Args:
      place: stored parameters -> the same on the student's devices.
    """
    shape = frozen.shape_of(teacher, policy=model)
    # A tied head is the embedding table: there is no other array to copy.
    table = ("embed", "tokens") if shape.tied_head else ("head", "kernel")
    head = {table[0]: {table[1]: teacher.stored[table[0]][table[1]]}}
    # Read in every minibatch: a head in host memory would be streamed each time.
    head = storage.store(head, memory="device")
    return frozen.freeze(place(head), model=teacher.model)
