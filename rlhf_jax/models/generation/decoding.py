"""Responses under way: what one more token changes, and writing that token."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional.unused_ids import Ranges
from rlhf_jax.models.caches import Caches
from rlhf_jax.models.generation.sampling import Shaping, sample_token

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
    caches: Caches  # of every layer
    finished: Array  # bool[B], the row has drawn a stop token
    step: Array  # i32[], response columns written
    prompt_size: int = flax.struct.field(pytree_node=False)  # P, columns


def append(
    state: Decoding,
    logits: Array,
    *,
    keys: Array,
    stop_ids: tuple[int, ...],
    temperature: float,
    shaping: Shaping | None,
    predicted: Array | None = None,
    unused: Ranges = (),
) -> Decoding:
    """Draws a token for every row that has not finished and writes its column.

    `predicted` and `unused` are those of `sample_token`.
    """
    alive = ~state.finished
    column = state.prompt_size + state.step
    token, logprob, entropy = sample_token(
        logits,
        keys=jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step),
        temperature=temperature,
        shaping=shaping,
        predicted=predicted,
        unused=unused,
    )

    def put(array: Array, values: Array) -> Array:
        values = jnp.where(alive, values, jnp.zeros_like(values))[:, None]
        return jax.lax.dynamic_update_slice_in_dim(array, values, column, axis=1)

    so_far = state.generated
    stopped = jnp.isin(token, jnp.asarray(stop_ids, jnp.int32))
    return dataclasses.replace(
        state,
        generated=Generated(
            tokens=put(so_far.tokens, token),
            mask=put(so_far.mask, alive),
            response_mask=put(so_far.response_mask, alive),
            logprobs=put(so_far.logprobs, logprob),
            entropy=put(so_far.entropy, entropy),
        ),
        finished=state.finished | stopped,
        step=state.step + 1,
    )
