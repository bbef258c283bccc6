"""What a student reads of its teacher: hidden states of its samples, and the head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import ReferenceOutput, Rollout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles.policy import logprobs_from_hidden
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array


@flax.struct.dataclass
class TeacherPrompts:
    """What the teacher reads in place of each prompt of a data set, left-padded."""

    tokens: Array  # i32[N, P'], by row of the data set; of the batch with `taught`
    mask: Array  # bool[N, P'], True at tokens
    # bool[B], rows of a batch in which it reads a demonstration; None: the rows are
    # those of the data set, and all are trained on.
    taught: Array | None = None


@jax.named_scope("reference")
def teacher_states(
    teacher: Frozen,
    *,
    rollout: Rollout,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    prompts: TeacherPrompts | None = None,
) -> ReferenceOutput:
    """One forward pass of the teacher over the student's samples.

        column             0   1   2   3   4   5
        the student reads  x   x   x   y   y   y
        the teacher        c   c   x   x   x   y   y   y      c: a demonstration

    Args:
      prompts: by `rollout.index`, or by row of the batch (`taught`); None: the teacher
        reads the student's own. With them it is conditioned on what the student does
        not see (self-distillation).

    Returns:
      Of the student's columns, whatever the teacher's prompts.

    Source: Shenfeld et al. 2026, arXiv:2601.19897 (SDFT): KL(π_θ(·|x) ‖ π(·|x, c)).
    Hübotter et al. 2026, arXiv:2601.20802 (SDPO), c a success of the response's group.
    """
    params, size = frozen.read(teacher), rollout.tokens.shape[1]
    if prompts is not None:
        rollout = _behind(prompts, rollout, max_new_tokens=max_new_tokens)
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
    logprobs = jnp.where(rollout.response_mask, logprobs, 0.0)
    # The state before the first response token stands a column before it.
    return ReferenceOutput(
        _columns(logprobs, count=max_new_tokens, size=size),
        _columns(hidden, count=max_new_tokens + 1, size=size),
        taught=None if prompts is None else prompts.taught,
    )


def _behind(
    prompts: TeacherPrompts, rollout: Rollout, *, max_new_tokens: int
) -> Rollout:
    """The responses behind the teacher's prompts."""
    row, width = rollout.index, prompts.tokens.shape[1]
    if prompts.taught is not None:
        row = jnp.arange(len(row))

    def joined(before: Array, after: Array) -> Array:
        return jnp.concatenate([before, after[:, -max_new_tokens:]], axis=1)

    blank = jnp.zeros((len(row), width), bool)
    return dataclasses.replace(
        rollout,
        tokens=joined(prompts.tokens[row], rollout.tokens),
        mask=joined(prompts.mask[row], rollout.mask),
        response_mask=joined(blank, rollout.response_mask),
    )


def _columns(x: Array, *, count: int, size: int) -> Array:
    """The last `count` columns of [B, S, ...], behind zeros, of `size` in all."""
    if x.shape[1] == size:
        return x
    room = ((0, 0), (size - count, 0), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x[:, -count:], room)


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
