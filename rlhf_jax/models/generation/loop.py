"""The decode loop: tokens that were drawn last are run, and the next are drawn.

    decode.py            plain batch, mixture    all rows write the same column
    places.py            continuous batching     a ring of columns, or pages
    episode_places.py    episodes                columns of each row's own

Every way to decode is `run` with a `step`. The ways differ in where the tokens of a row
stand, and in what is kept of them: a record with a function `recorded` beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.functional.unused_ids import Ranges
from rlhf_jax.models import cached_decoder, decoder
from rlhf_jax.models.cached_decoder import Seen, prefill
from rlhf_jax.models.caches import Caches, placed
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation.sampling import Shaping, sample_token
from rlhf_jax.models.layers import unstack

Array = jax.Array
Params = Any
State = TypeVar("State")
Record = TypeVar("Record", bound=Any)  # with tokens, logprobs and entropy, [B, W] each


class Decoder(NamedTuple):
    """A decoder that logits come from."""

    params: Params
    model: ModelConfig
    layers: tuple[Params, ...] = ()  # as `step` reads them, of `layers_to_decode`

    def to_decode(self, *, rows: int) -> Decoder:
        """With parameters for a step of so many rows; once, before the loop."""
        layers = cached_decoder.layers_to_decode(
            self.params, model=self.model, rows=rows
        )
        params = cached_decoder.params_to_decode(self.params, model=self.model)
        return self._replace(params=params, layers=layers)


class Drawn(NamedTuple):
    """One token per row."""

    token: Array  # i32[B]
    logprob: Array  # f32[B], nats, of the distribution the token was drawn from
    entropy: Array  # f32[B], nats, of that distribution
    stops: Array  # bool[B], it is a stop token

    def put(self, record: Record, *, here: Array) -> Record:
        """The record with the tokens and their numbers where bool[B, W] says."""
        tokens, logprobs, entropy = (
            jnp.where(here, new[:, None], old)
            for new, old in (
                (self.token, record.tokens),
                (self.logprob, record.logprobs),
                (self.entropy, record.entropy),
            )
        )
        return dataclasses.replace(
            record, tokens=tokens, logprobs=logprobs, entropy=entropy
        )


@dataclasses.dataclass(frozen=True)
class Draw:
    """How tokens are drawn, and which of them end a response."""

    stop_ids: tuple[int, ...]  # themselves kept
    temperature: float = 1.0  # divides the logits, dimensionless
    shaping: Shaping | None = None  # for evaluation only; None draws from the policy
    unused: Ranges = ()  # `ModelConfig.unused_ids`
    # The logits to draw from, of those of every decoder.
    hook: Callable[..., Array] = lambda logits: logits

    def __call__(
        self, *logits: Array, keys: Array, number: Array, predicted: Array | None = None
    ) -> Drawn:
        """A token for every row, drawn with fold_in(keys[b], number).

        Args:
          logits: f32[B, V] of every decoder.
          keys: key[B], of the rows.
          number: which token of its response it is, i32[] in all rows or i32[B].
          predicted: bool[B], a token stands before it (`sample_token`); None is all.
        """
        # By the token's number in its response: prompt width and waiting change no
        # draw. Recorded runs depend on this order of folding.
        fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, 0 if number.ndim else None))
        token, logprob, entropy = sample_token(
            self.hook(*logits),
            keys=fold_in(keys, number),
            temperature=self.temperature,
            shaping=self.shaping,
            predicted=predicted,
            unused=self.unused,
        )
        stops = jnp.isin(token, jnp.asarray(self.stop_ids, jnp.int32))
        return Drawn(token, logprob, entropy, stops)


def read_prompts(
    sampled: Decoder,
    *,
    tokens: Array,
    mask: Array,
    group_size: int,
    columns: int | None,
    end: Array | int,
) -> tuple[Array, Caches]:
    """Logits f32[B, V] after prompts, and a cache of their columns.

    Args:
      tokens, mask: i32[B, P] and bool[B, P], left-padded.
      group_size: consecutive rows with one prompt, which is run once for all of them.
      columns, end: those of `caches.placed`; None leaves the cache as it came.
    """
    params, model, _ = sampled
    # One prompt of each group is run, and its cache repeated.
    last, key_values = prefill(
        params, model=model, tokens=tokens[::group_size], mask=mask[::group_size]
    )
    last, caches = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, group_size, axis=0),
        (last, unstack(key_values, num_layers=model.num_layers)),
    )
    if columns is not None:
        caches = placed(caches, model=model, columns=columns, end=end)
    # f32[B, V], of the last column alone.
    return decoder.logits(params, last, model=model, spread=True), caches


def step(
    decoders: Sequence[Decoder],
    caches: Sequence[Caches],
    *,
    tokens: Array,
    positions: Array,
    attend: Array | Seen,
    column: Array,
    draw: Draw,
    keys: Array,
    number: Array,
) -> tuple[Drawn, tuple[Caches, ...]]:
    """Runs the token that every row drew last, and draws the next.

    Args:
      decoders, caches: with layers, and of each the keys and values.
      tokens, positions: i32[B], those tokens, and how many stand before each.
      attend, column: what they see and where they are written, as `decode_step` has it.
    """
    logits, updated = [], []
    for (params, model, layers), cache in zip(decoders, caches, strict=True):
        hidden, cache = cached_decoder.decode_step(
            params,
            layers=layers,
            model=model,
            tokens=tokens[:, None],
            positions=positions[:, None],
            attend=attend,
            caches=cache,
            column=column,
        )
        logits.append(decoder.logits(params, hidden[:, 0], model=model, spread=True))
        updated.append(cache)
    return draw(*logits, keys=keys, number=number), tuple(updated)


def run(
    state: State,
    *,
    advance: Callable[[State], State],
    more: Callable[[State], Array],
    axis: str | None = None,
) -> State:
    """Advances a state as long as there is more to do.

    Args:
      axis: of a `shard_map`, along which all go on until none has more to do, as
        devices that exchange something must for every token; None is each by itself.
    """

    if axis is None:
        # A `while_loop` and no scan: it ends with the longest response of the batch.
        return jax.lax.while_loop(more, advance, state)

    def any_more(state: State) -> Array:
        # Devices that share a collective in `advance` must take as many turns: one that
        # has finished goes on until none has more.
        return jax.lax.psum(more(state), axis) > 0

    def turn(carry: tuple[State, Array]) -> tuple[State, Array]:
        state = advance(carry[0])
        return state, any_more(state)

    first = state, any_more(state)
    return jax.lax.while_loop(lambda carry: carry[1], turn, first)[0]
