"""Sampling from the geometric mixture of two decoders, one token at a time.

    π^mix(token | before) ∝ π(token | before)^(1 - m) · μ(token | before)^m

Both run in one loop, each against a cache of its own, as `decode.py` runs one. The
mixture is of each token's distribution: that of whole responses has no such form.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import cached_decoder, heads
from rlhf_jax.models.caches import growing_widths, placed, widened
from rlhf_jax.models.chunked_prefill import prefill
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation.decoding import Decoding, Generated, append
from rlhf_jax.models.layers import unstack

Array = jax.Array
Params = Any


class Side(NamedTuple):
    """One of the two decoders."""

    params: Params
    model: ModelConfig


def generate(
    policy: Side,
    other: Side,
    *,
    share: float,
    tokens: Array,
    mask: Array,
    keys: Array,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float = 1.0,
) -> Generated:
    """Samples a response to every prompt from the mixture.

    Args:
      policy: π, parameters and shape.
      other: μ, of the same vocabulary; its width and depth may be others.
      share: m, the weight of μ's log-probs, between 0 and 1.
      tokens, mask: i32[B, P] and bool[B, P], left-padded prompts of at least one token.
      keys: key[B], from `decode.row_keys`.
      max_new_tokens: R, the response columns.
      stop_ids: tokens that end a response.
      temperature: > 0, divides the logits of both.

    Returns:
      Generated; `logprobs` and `entropy` are those of the mixture, 0 outside the
      response.

    Raises:
      InputError: share is not between 0 and 1, the vocabularies differ, or prompt and
        response are longer than the context of either.

    Source: Munos et al. 2023, arXiv:2312.00886, sections 6 and 7.
    """
    size = tokens.shape[1] + max_new_tokens
    if not 0 < share < 1:
        raise InputError(f"share: expected a number between 0 and 1, got {share}")
    if policy.model.vocab_size != other.model.vocab_size:
        raise InputError(
            f"expected two models of one vocabulary, got {policy.model.vocab_size} and "
            f"{other.model.vocab_size} ids"
        )
    context = min(policy.model.max_positions, other.model.max_positions)
    if size > context or temperature <= 0:
        raise InputError(
            f"expected prompt and response within {context} positions and a "
            f"temperature above 0, got {size} and {temperature}"
        )
    sides, rows = (policy, other), tokens.shape[0]
    widths = growing_widths(size, first=tokens.shape[1])
    draw = functools.partial(
        append,
        keys=keys,
        stop_ids=stop_ids,
        temperature=temperature,
        shaping=None,
        unused=policy.model.unused_ids,
    )

    def mixed(hidden: list[Array]) -> Array:
        ours, theirs = (
            heads.logits(side.params, of, model=side.model, spread=True)
            for side, of in zip(sides, hidden, strict=True)
        )
        return (1 - share) * ours + share * theirs

    lasts, caches = [], []
    for params, model in sides:
        last, key_values = prefill(params, model=model, tokens=tokens, mask=mask)
        lasts.append(last)
        filled = unstack(key_values, num_layers=model.num_layers)
        caches.append(
            placed(filled, model=model, columns=widths[0], end=tokens.shape[1])
        )
    room = ((0, 0), (0, max_new_tokens))
    nothing = jnp.zeros((rows, size), jnp.float32)
    state = Decoding(
        generated=Generated(
            tokens=jnp.pad(jnp.where(mask, tokens, 0), room),
            mask=jnp.pad(mask, room),
            response_mask=jnp.zeros((rows, size), bool),
            logprobs=nothing,
            entropy=nothing,
        ),
        caches=tuple(caches),  # of both
        finished=jnp.zeros(rows, bool),
        step=jnp.zeros((), jnp.int32),
        prompt_size=tokens.shape[1],
    )
    state = draw(state, mixed(lasts), predicted=mask[:, -1])
    layers = [
        cached_decoder.layers_to_decode(side.params, model=side.model, rows=rows)
        for side in sides
    ]

    def more(state: Decoding, width: int) -> Array:
        written = state.prompt_size + state.step
        return (written < size) & (written <= width) & ~state.finished.all()

    def advance(state: Decoding, width: int) -> Decoding:
        so_far = state.generated
        column = state.prompt_size + state.step - 1
        hidden, caches = [], []
        each: Any = state.caches  # of both
        for side, of_side, cache in zip(sides, layers, each, strict=True):
            state_of_last, cache = cached_decoder.decode_step(
                side.params,
                layers=of_side,
                model=side.model,
                tokens=jax.lax.dynamic_index_in_dim(
                    so_far.tokens, column, 1, keepdims=False
                ),
                positions=so_far.mask.sum(axis=1, dtype=jnp.int32) - 1,
                attend=so_far.mask[:, :width],
                caches=cache,
                column=column,
            )
            hidden.append(state_of_last)
            caches.append(cache)
        state = dataclasses.replace(state, caches=tuple(caches))
        return draw(state, mixed(hidden))

    for width in widths:
        each: Any = state.caches
        wider = tuple(
            widened(cache, model=side.model, columns=width)
            for side, cache in zip(sides, each, strict=True)
        )
        state = jax.lax.while_loop(
            functools.partial(more, width=width),
            functools.partial(advance, width=width),
            dataclasses.replace(state, caches=wider),
        )
    return state.generated
