"""The teacher's hidden states at a student's samples, and the teacher's head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import ReferenceOutput, Rollout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles.policy import logprobs_from_hidden
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array


@flax.struct.dataclass
class TeacherPrompts:
    """Left-padded prompts that the teacher reads in place of the student's."""

    tokens: Array  # i32[N, P'], by row of the data set; by row of the batch if `taught`
    mask: Array  # bool[N, P'], True at tokens
    # bool[B], rows of the batch whose prompt has a demonstration; None: prompts are by
    # row of the data set, and all rows are trained on.
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
    replays: bool = False,
) -> ReferenceOutput:
    """One forward pass of the teacher over the student's samples.

        column             0   1   2   3   4   5
        the student reads  x   x   x   y   y   y
        the teacher        c   c   x   x   x   y   y   y      c: a demonstration

    Args:
      prompts: by `rollout.index`, or by row of the batch (`taught`), with context that
        the student does not see (self-distillation); None: the student's own prompts.
      replays: route tokens to the rollout's experts, except those of `prompts`.

    Returns:
      ReferenceOutput[B, S] in the student's columns, whatever the teacher's prompts.

    Source: Shenfeld et al. 2026, arXiv:2601.19897 (SDFT): KL(π_θ(·|x) ‖ π(·|x, c)).
    Hübotter et al. 2026, arXiv:2601.20802 (SDPO): c is a successful response.
    """
    params, size = frozen.read(teacher), rollout.tokens.shape[1]
    if prompts is not None:
        rollout = _behind(prompts, rollout, max_new_tokens=max_new_tokens)
    model = frozen.shape_of(teacher, policy=model)
    first_column = rollout.tokens.shape[1] - max_new_tokens
    texts = texts_of(rollout.tokens, rollout.mask, first_column=first_column)
    experts = rollout.experts if replays else None
    hidden = texts.hidden_states(params, model=model, experts=experts)
    logprobs, _ = logprobs_from_hidden(
        params, hidden, texts=texts, model=model, temperature=temperature
    )
    logprobs = jnp.where(rollout.response_mask, logprobs, 0.0)
    # The state that predicts the first response token is one column before it.
    return ReferenceOutput(
        _columns(logprobs, count=max_new_tokens, size=size),
        _columns(hidden, count=max_new_tokens + 1, size=size),
        taught=None if prompts is None else prompts.taught,
    )


def _behind(
    prompts: TeacherPrompts, rollout: Rollout, *, max_new_tokens: int
) -> Rollout:
    """The rollout with the teacher's prompts before the responses."""
    row, width = rollout.index, prompts.tokens.shape[1]
    if prompts.taught is not None:
        row = jnp.arange(len(row))

    def joined(before: Array, after: Array) -> Array:
        return jnp.concatenate([before, after[:, -max_new_tokens:]], axis=1)

    blank = jnp.zeros((len(row), width), bool)
    experts = rollout.experts
    if experts is not None:
        own = jnp.full((len(row), width, *experts.shape[2:]), OWN, experts.dtype)
        experts = joined(own, experts)
    return dataclasses.replace(
        rollout,
        tokens=joined(prompts.tokens[row], rollout.tokens),
        mask=joined(prompts.mask[row], rollout.mask),
        response_mask=joined(blank, rollout.response_mask),
        experts=experts,
    )


def _columns(x: Array, *, count: int, size: int) -> Array:
    """The last `count` columns of [B, S, ...], left-padded with zeros to `size`."""
    if x.shape[1] == size:
        return x
    room = ((0, 0), (size - count, 0), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x[:, -count:], room)


def head_of(
    teacher: Frozen, *, model: ModelConfig, place: Callable[[Any], Any]
) -> Frozen:
    """A copy of the teacher's head, in its storage dtype, on the student's devices.

    Args:
      place: moves stored parameters to the student's devices.
    """
    shape = frozen.shape_of(teacher, policy=model)
    # A tied head is the embedding table.
    table = ("embed", "tokens") if shape.tied_head else ("head", "kernel")
    head = {table[0]: {table[1]: teacher.stored[table[0]][table[1]]}}
    # Every minibatch reads the head: in host memory it would be streamed each time.
    head = storage.store(head, memory="device")
    return frozen.freeze(place(head), model=teacher.model)
