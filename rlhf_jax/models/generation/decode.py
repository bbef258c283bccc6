"""Sampling from a decoder: one pass over prompts, then a loop over a cache.

column         0    1    2  |  3    4    5    6      P = 3, max_new_tokens = 4
tokens         ·   The  cat | sat  down EOS   ·
response_mask  0    0    0  |  1    1    1    0

`start` runs the prompts and draws column 3 from the logits after column 2. Each turn of
`finish` runs the token drawn last, and draws the next column.

The cache grows with the columns: one loop fills a width, then the cache moves to twice
this width, and the next loop goes on. The cache of a local layer stops growing at its
window (`caches.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.caches import Caches, growing_widths, widened
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.generation import sampling
from rlhf_jax.models.generation.sampling import Decoder, Draw, Drawn, Shaping, TopK

if TYPE_CHECKING:
    from rlhf_jax.models.generation.places import Responses

Array = jax.Array
Params = Any


@flax.struct.dataclass
class Generated:
    """Prompts with their responses, as in the module's docstring."""

    tokens: Array  # i32[B, S], 0 at padding
    mask: Array  # bool[B, S], not padding
    response_mask: Array  # bool[B, S], response tokens, the stop token included
    logprobs: Array  # f32[B, S], nats, of the distribution each token was drawn from
    entropy: Array  # f32[B, S], nats, of that distribution
    # i32[B, S, L, k], the experts of each token; -1 at padding, and at the last token
    # of a response, which is not run. None unless requested.
    experts: Array | None = None
    # [B, S, k], 0 outside the response; None unless requested.
    top_k: TopK | None = None


@flax.struct.dataclass
class Decoding:
    """Responses under way; donate it."""

    generated: Generated  # so far; later columns are padding
    caches: tuple[Caches, ...]  # of every decoder; a mixture has two
    finished: Array  # bool[B], True once the row has drawn a stop token
    step: Array  # i32[], response columns written
    prompt_size: int = flax.struct.field(pytree_node=False)  # P, columns


def row_keys(key: Array, *, index: Array, sample: Array) -> Array:
    """One key per row: fold_in(fold_in(key, index), sample).

    A prompt's samples then depend only on its index and sample number, not on its row,
    the batch or the devices.

    Args:
      key: key[], of this step.
      index: i32[B], row of the data set.
      sample: i32[B], number of the sample of that prompt.

    Returns:
      key[B].
    """
    # Not split: the i-th of B split keys would belong to a row of the batch, not to a
    # prompt.
    return jax.vmap(lambda i, s: jax.random.fold_in(jax.random.fold_in(key, i), s))(
        index, sample
    )


def generate(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    keys: Array,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float = 1.0,
    shaping: Shaping | None = None,
    group_size: int = 1,
    continuous_batching: int | None = None,
    record_experts: bool = False,
    record_top_k: int | None = None,
) -> Generated:
    """Samples a response to every prompt from softmax(logits / temperature).

    Runs `start` and `finish` in one program.

    Args:
      tokens, mask: i32[B, P] and bool[B, P], left-padded prompts. The first token of
        an empty prompt is drawn uniformly, with log-prob and entropy 0
        (`sample_token`).
      keys: key[B], from `row_keys`; response token t is drawn with
        fold_in(keys[b], t), whatever the prompt's width.
      max_new_tokens: R, the response columns; S = P + R.
      stop_ids: a row ends with the first of these, which is part of the response; the
        loop ends with the last row. Empty: every response has R tokens.
      temperature: > 0, divides the logits, dimensionless.
      shaping: for evaluation only; None draws from the policy itself.
      group_size: G, rows g·G to g·G + G - 1 have the same prompt, which is run once.
      continuous_batching: rows that are decoded at a time; the others take the places
        of rows that finish (`continuous_batching.respond`). The samples are the same up
        to rounding. It takes less memory, and less time if lengths differ. None decodes
        every row at once. With `model.cache_pages` on a mesh each `data` share decodes
        its own rows (`row_shares`).
      record_experts: keep the experts of every token of a mixture, for replay.
      record_top_k: number of likeliest tokens to keep at each position, with their
        log-probs; None keeps none.

    Returns:
      Generated, with 0 in `logprobs` and `entropy` outside the response.

    Raises:
      InputError: temperature <= 0, no new tokens, a prompt of no columns, more
        columns than the model has positions, groups that do not divide the rows,
        continuous_batching below a group or above the rows, or `model.cache_pages`
        without it or too few for one row.
    """
    draw = Draw(stop_ids, temperature, shaping, model.unused_ids, record_top_k)
    decoder = Decoder(params, model, record=record_experts)
    if record_experts and model.experts is None:
        raise InputError(
            f"record_experts: expected a mixture of experts, got a dense "
            f"{model.family}; leave the record out"
        )
    if record_top_k is not None and continuous_batching is not None:
        raise InputError(
            "record_top_k: expected a decoder of every row at once, got continuous "
            "batching, which keeps no such record; leave one of them out"
        )
    if continuous_batching is not None:
        # Imported only by runs that choose it.
        from rlhf_jax.models.generation.row_shares import respond

        _check(
            model,
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        checks.groups(tokens.shape[0], group_size=group_size)
        responses = respond(
            decoder,
            tokens=tokens,
            mask=mask,
            keys=keys,
            places=continuous_batching,
            max_new_tokens=max_new_tokens,
            draw=draw,
            group_size=group_size,
        )
        return _after(responses, tokens=tokens, mask=mask)
    if model.cache_pages is not None:
        raise InputError(
            f"cache_pages: expected continuous_batching with it, whose rows free their "
            f"pages for prompts that wait, got {model.cache_pages} without; give both, "
            f"or neither"
        )
    state = start(
        [decoder],
        tokens=tokens,
        mask=mask,
        keys=keys,
        max_new_tokens=max_new_tokens,
        draw=draw,
        group_size=group_size,
    )
    return finish([decoder], state=state, keys=keys, draw=draw).generated


def start(
    decoders: Sequence[Decoder],
    *,
    tokens: Array,
    mask: Array,
    keys: Array,
    max_new_tokens: int,
    draw: Draw,
    group_size: int = 1,
) -> Decoding:
    """Runs the prompts once, fills the caches and draws the first response token.

    Args:
      decoders: usually one; a mixture has two.
      tokens, mask, keys, max_new_tokens, group_size: as in `generate`.

    Returns:
      Decoding with step 1 and room for R columns.

    Raises:
      InputError: temperature, sizes or groups are out of range, or prompt and response
        are longer than a decoder's context.
    """
    rows, prompt_size = tokens.shape
    size = prompt_size + max_new_tokens
    room = ((0, 0), (0, max_new_tokens))
    checks.groups(rows, group_size=group_size)
    logits, caches, experts = [], [], None
    for decoder in decoders:
        _check(
            decoder.model,
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            temperature=draw.temperature,
        )
        last, cache, chosen = sampling.read_prompts(
            decoder,
            tokens=tokens,
            mask=mask,
            group_size=group_size,
            columns=growing_widths(size, first=prompt_size)[0],
            end=prompt_size,
        )
        logits.append(last)
        caches.append(cache)
        if chosen is not None:
            room_of = ((0, 0), (0, max_new_tokens), (0, 0), (0, 0))
            experts = jnp.pad(chosen, room_of, constant_values=OWN)
    state = Decoding(
        generated=Generated(
            # All columns from the start, as the state of a loop has one shape.
            tokens=jnp.pad(jnp.where(mask, tokens, 0), room),
            mask=jnp.pad(mask, room),
            response_mask=jnp.zeros((rows, size), bool),
            logprobs=jnp.zeros((rows, size), jnp.float32),
            entropy=jnp.zeros((rows, size), jnp.float32),
            experts=experts,
        ),
        caches=tuple(caches),
        finished=jnp.zeros(rows, bool),
        step=jnp.zeros((), jnp.int32),
        prompt_size=prompt_size,
    )
    drawn = draw(*logits, keys=keys, number=state.step, predicted=mask[:, -1])
    if drawn.top_k is not None:
        room_of = jax.tree.map(
            lambda x: jnp.zeros((rows, size, x.shape[-1]), x.dtype), drawn.top_k
        )
        generated = dataclasses.replace(state.generated, top_k=room_of)
        state = dataclasses.replace(state, generated=generated)
    return recorded(state, drawn)


def finish(
    decoders: Sequence[Decoder], *, state: Decoding, keys: Array, draw: Draw
) -> Decoding:
    """Draws the other tokens, one column per turn, until every row has stopped.

    Args:
      state: from `start`. Donate it if this is a program of its own: the loop then
        writes into its caches.
    """
    rows, size = state.generated.tokens.shape
    # Outside the loop: layers are taken apart (and transposed) only once.
    ready = [decoder.to_decode(rows=rows) for decoder in decoders]

    def more(state: Decoding, width: int) -> Array:
        written = state.prompt_size + state.step
        return (written < size) & (written <= width) & ~state.finished.all()

    def advance(state: Decoding, width: int) -> Decoding:
        so_far, column = state.generated, state.prompt_size + state.step - 1
        drawn, caches = sampling.step(
            ready,
            state.caches,
            tokens=jax.lax.dynamic_index_in_dim(
                so_far.tokens, column, 1, keepdims=False
            ),
            # Tokens before the one that runs, without padding.
            positions=so_far.mask.sum(axis=1, dtype=jnp.int32) - 1,
            # Left padding and later columns are both False.
            attend=so_far.mask[:, :width],
            column=column,
            draw=draw,
            keys=keys,
            number=state.step,
            going=~state.finished,
        )
        return recorded(dataclasses.replace(state, caches=caches), drawn)

    # A few loops of doubling width, compiled one by one: attention reads few empty
    # columns, and a response that ends early never pays for R columns.
    for width in growing_widths(size, first=state.prompt_size):
        caches = tuple(
            widened(cache, model=decoder.model, columns=width)
            for decoder, cache in zip(decoders, state.caches, strict=True)
        )
        state = sampling.run(
            dataclasses.replace(state, caches=caches),
            advance=functools.partial(advance, width=width),
            more=functools.partial(more, width=width),
        )
    return state


def recorded(state: Decoding, drawn: Drawn) -> Decoding:
    """Records a column of tokens, of the rows that have not finished."""
    alive = ~state.finished
    column = state.prompt_size + state.step

    def put(array: Array, values: Array) -> Array:
        # Finished rows still run with the others; their tokens are not kept.
        lives = alive.reshape(-1, *(1,) * (values.ndim - 1))
        values = jnp.where(lives, values, jnp.zeros_like(values))[:, None]
        return jax.lax.dynamic_update_slice_in_dim(array, values, column, axis=1)

    so_far, experts = state.generated, state.generated.experts
    if experts is not None and drawn.experts is not None:
        # Of the token before, which was run to draw this one; `OWN` in finished rows.
        ran = drawn.experts[:, None]
        experts = jax.lax.dynamic_update_slice_in_dim(experts, ran, column - 1, axis=1)
    return dataclasses.replace(
        state,
        generated=Generated(
            tokens=put(so_far.tokens, drawn.token),
            mask=put(so_far.mask, alive),
            response_mask=put(so_far.response_mask, alive),
            logprobs=put(so_far.logprobs, drawn.logprob),
            entropy=put(so_far.entropy, drawn.entropy),
            experts=experts,
            top_k=jax.tree.map(put, so_far.top_k, drawn.top_k),
        ),
        # The stop token is recorded too: it is part of the response.
        finished=state.finished | drawn.stops,
        step=state.step + 1,
    )


def _after(responses: Responses, *, tokens: Array, mask: Array) -> Generated:
    prompt, size = tokens.shape[1], responses.tokens.shape[1]
    room = ((0, 0), (prompt, 0))
    drawn = jnp.arange(size)[None] < responses.lengths[:, None]
    return Generated(
        tokens=jnp.concatenate([jnp.where(mask, tokens, 0), responses.tokens], axis=1),
        mask=jnp.concatenate([mask, drawn], axis=1),
        response_mask=jnp.pad(drawn, room),
        logprobs=jnp.pad(responses.logprobs, room),
        entropy=jnp.pad(responses.entropy, room),
        experts=responses.experts,
    )


def _check(
    model: ModelConfig, *, tokens: Array, max_new_tokens: int, temperature: float
) -> None:
    checks.within(
        above=0,
        advice="for the most likely token use Shaping(greedy=True)",
        temperature=temperature,
    )
    prompt = tokens.shape[1]
    checks.at_least_one(columns_of_prompts=prompt, max_new_tokens=max_new_tokens)
    checks.within(
        most=model.max_positions,
        advice="shorten prompts or responses",
        **{"prompt + max_new_tokens": prompt + max_new_tokens},
    )
