"""Responses under way, of rows that all draw the same column."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models.caches import Caches
from rlhf_jax.models.generation.loop import Drawn

Array = jax.Array


@flax.struct.dataclass
class Generated:
    """Prompts with their responses; see the drawing in `decode.py`."""

    tokens: Array  # i32[B, S], 0 at padding
    mask: Array  # bool[B, S], not padding
    response_mask: Array  # bool[B, S], response tokens, the stop token included
    logprobs: Array  # f32[B, S], nats, of the distribution each token was drawn from
    entropy: Array  # f32[B, S], nats, of that distribution


@flax.struct.dataclass
class Decoding:
    """Responses under way: all that one more token changes, so donate it."""

    generated: Generated  # so far; columns to come are padding
    caches: tuple[Caches, ...]  # of every decoder; a mixture has two
    finished: Array  # bool[B], the row has drawn a stop token
    step: Array  # i32[], response columns written
    prompt_size: int = flax.struct.field(pytree_node=False)  # P, columns


def recorded(state: Decoding, drawn: Drawn) -> Decoding:
    """A column more, of the rows that have not finished."""
    alive = ~state.finished
    column = state.prompt_size + state.step

    def put(array: Array, values: Array) -> Array:
        values = jnp.where(alive, values, jnp.zeros_like(values))[:, None]
        return jax.lax.dynamic_update_slice_in_dim(array, values, column, axis=1)

    so_far = state.generated
    return dataclasses.replace(
        state,
        generated=Generated(
            tokens=put(so_far.tokens, drawn.token),
            mask=put(so_far.mask, alive),
            response_mask=put(so_far.response_mask, alive),
            logprobs=put(so_far.logprobs, drawn.logprob),
            entropy=put(so_far.entropy, drawn.entropy),
        ),
        finished=state.finished | drawn.stops,
        step=state.step + 1,
    )
