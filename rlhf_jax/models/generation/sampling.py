"""Draws one token from logits, and the loop that runs it and draws the next.

    decode.py            plain batch, mixture    all rows write the same column
    places.py            continuous batching     a ring of columns, or pages
    episode_places.py    episodes                each row has its own columns

Every way to decode is `run` with a `step`. They differ in where the tokens of a row
are, and in the record that is kept of them, with a function `recorded` beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import logprobs, unused_ids
from rlhf_jax.functional.errors import refuse
from rlhf_jax.functional.unused_ids import Ranges
from rlhf_jax.models import axes, cached_decoder, decoder
from rlhf_jax.models.cached_decoder import Seen, prefill
from rlhf_jax.models.caches import Caches, placed
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.layers import unstack

Array = jax.Array

BLOCK = 256  # tokens of the vocabulary that `drawn` sums at a time
_BELOW_ONE = 1 - 2.0**-24  # the largest f32 below 1


@dataclasses.dataclass(frozen=True)
class Shaping:
    """How an *evaluation* sample departs from the policy; None is off.

    Training rollouts use none of these: the sampled distribution would no longer be the
    one whose KL to the reference is penalised.
    """

    greedy: bool = False  # the most likely token, whatever the key
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the smallest set of at least this probability
    min_p: float | None = None  # keep tokens of at least this share of the largest

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.top_k is not None and self.top_k < 1:
            yield f"expected top_k >= 1, got {self.top_k}; None is off"
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                yield f"expected 0 < {name} <= 1, got {value}; None is off"


def sample_token(
    logits: Array,
    *,
    keys: Array,
    temperature: float,
    shaping: Shaping | None = None,
    predicted: Array | None = None,
    unused: Ranges = (),
) -> tuple[Array, Array, Array]:
    """Draws one token per row by the inverse of the cumulative distribution.

    A uniform number has 23 bits: tokens of a probability below 1e-7 are drawn at the
    right rate together, but not each of them. `drawn` says which are never drawn.

    Args:
      logits: floats[B, V] of any precision; converted to float32.
      keys: key[B], each used for one uniform number.
      temperature: > 0, divides the logits, dimensionless.
      shaping: for evaluation only; None draws from the policy itself.
      predicted: bool[B], rows with a token before the one to draw; None is every row.
        Nothing predicts the first token of an empty prompt: it is drawn uniformly, and
        its log-probability is 0, as in `policy.logprobs`.
      unused: ranges of ids without a token (`ModelConfig.unused_ids`), which are -inf
        in `logits`; the uniform draw leaves them out too.

    Returns:
      token i32[B], its log-probability f32[B] and the entropy f32[B], nats, of the
      distribution drawn from: softmax(logits / temperature), or its shaped form. A
      greedy choice has the log-probability and entropy that a draw would have.
    """
    if predicted is not None:
        predicted = axes.rows_apart(predicted)
        logits = jnp.where(predicted[:, None], logits, 0.0)
        if unused:
            logits = unused_ids.masked(logits, unused)
    # As in `logprobs`: log-probs of sampler and trainer must agree to 1e-4 nats.
    logits = logits.astype(jnp.float32) / temperature
    if shaping is not None:
        logits = shape_logits(logits, shaping=shaping)
    log_softmax = jax.nn.log_softmax(logits, axis=-1)
    entropy = logprobs.entropy(logits)
    if shaping is not None and shaping.greedy:
        # No key is used: greedy responses do not depend on the seed.
        token = jnp.argmax(logits, axis=-1)
    else:
        # Otherwise the computation of the keys would be sharded like the logits.
        uniform = axes.rows_apart(jax.vmap(lambda key: jax.random.uniform(key))(keys))
        token = drawn(jnp.exp(log_softmax), uniform=uniform)
    logprob = jnp.take_along_axis(log_softmax, token[:, None], axis=-1)[:, 0]
    if predicted is not None:
        logprob = jnp.where(predicted, logprob, 0.0)
        entropy = jnp.where(predicted, entropy, 0.0)
    # Moves a row's numbers back to the devices that have its columns.
    of_rows = token.astype(jnp.int32), logprob, entropy
    token, logprob, entropy = map(axes.rows_apart, of_rows)
    return token, logprob, entropy


def drawn(weights: Array, *, uniform: Array) -> Array:
    """The index at which the cumulative weights reach a uniform share of their total.

    A uniform number of 23 bits stands for the middle of its interval: at its lower end,
    0 would draw the first token, however unlikely. A large vocabulary is searched by
    blocks, then within one block by the share that is left, so that no sum runs along
    all of it.

    Args:
      weights: f32[B, V], >= 0, with a positive one in each row.
      uniform: f32[B], in [0, 1), a multiple of 2^-23.

    Returns:
      i32[B], V - 1 where the weights are not finite. Never drawn are a weight of 0, a
      block of less than 2^-31 of the total, and a weight of less than 2^-31 of its
      block.
    """
    size = weights.shape[-1]
    share = jnp.minimum(uniform + 2.0**-24, _BELOW_ONE)
    if size <= BLOCK:
        index, _ = _reached(weights, share=share)
    else:
        room = -size % BLOCK
        blocks = jnp.pad(weights, ((0, 0), (0, room))).reshape(len(weights), -1, BLOCK)
        block, share = _reached(blocks.sum(axis=-1), share=share)
        inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        index = block * BLOCK + _reached(inside, share=share)[0]
    finite = jnp.isfinite(weights.sum(axis=-1))
    return jnp.where(finite, index, size - 1)


def _reached(weights: Array, *, share: Array) -> tuple[Array, Array]:
    """Where the cumulative weights exceed a share of the total, and the share left.

    Weights are counted in integer units of 2^-30 of their total. Sums of floats would
    round, and then draw the neighbour of a likely token too often, at 1e-7 instead of
    its own probability.

    Returns:
      i32[B], an index with a positive count, and f32[B], in (0, 1): how far the share
      reaches into its weight.
    """
    total = weights.sum(axis=-1, keepdims=True)
    # Sums of integers are exact, in any order.
    counts = jnp.round(weights / total * 2.0**30).astype(jnp.int32)
    cumulative = jnp.cumsum(counts, axis=-1)
    target = (share * cumulative[:, -1].astype(jnp.float32)).astype(jnp.int32)
    index = jnp.argmax(cumulative > target[:, None], axis=-1)
    count, end = (
        jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]
        for x in (counts, cumulative)
    )
    left = (target - (end - count)).astype(jnp.float32) + 0.5
    return index, jnp.minimum(left / count.astype(jnp.float32), _BELOW_ONE)


def shape_logits(logits: Array, *, shaping: Shaping) -> Array:
    """Sets the logits of tokens that the shaping drops to -inf.

    top-k, top-p and min-p act in this order, each on the tokens that the one before
    kept, as in `transformers`. Tokens that tie with the last one kept are kept.

    Returns:
      f32[B, V].

    Sources: top-k, Fan et al. 2018; top-p, Holtzman et al. 2020, arXiv:1904.09751;
    min-p, Nguyen et al. 2024, arXiv:2407.01082.
    """
    if shaping.top_k is not None and shaping.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, shaping.top_k)[0][:, -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if shaping.top_p is not None:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        # Exclusive: the token that crosses top_p is kept.
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.where(before < shaping.top_p, descending, jnp.inf)
        smallest = kept.min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if shaping.min_p is not None:
        # p >= min_p · p_max in logs, which needs no softmax.
        smallest = logits.max(axis=-1, keepdims=True) + math.log(shaping.min_p)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    return logits


Params = Any
State = TypeVar("State")
Record = TypeVar("Record", bound=Any)  # with tokens, logprobs and entropy, [B, W] each


class Decoder(NamedTuple):
    """A decoder to sample from."""

    params: Params
    model: ModelConfig
    layers: tuple[Params, ...] = ()  # for `step`, from `layers_to_decode`
    record: bool = False  # whether to record the experts of tokens

    def to_decode(self, *, rows: int) -> Decoder:
        """Prepares the parameters for steps of `rows` rows; once, before the loop."""
        layers = cached_decoder.layers_to_decode(
            self.params, model=self.model, rows=rows
        )
        params = cached_decoder.params_to_decode(self.params, model=self.model)
        return self._replace(params=params, layers=layers)


@flax.struct.dataclass
class TopK:
    """The k likeliest tokens of distributions that tokens were drawn from."""

    tokens: Array  # i32[..., k], the likeliest first
    logprobs: Array  # f32[..., k], nats, normalised over the whole vocabulary


class Drawn(NamedTuple):
    """One token per row."""

    token: Array  # i32[B]
    logprob: Array  # f32[B], nats, of the distribution the token was drawn from
    entropy: Array  # f32[B], nats, of that distribution
    stops: Array  # bool[B], True for a stop token
    # i32[B, L, k], of the token that ran before; None unless a decoder records them.
    experts: Array | None = None
    top_k: TopK | None = None  # [B, k]; None unless requested

    def put(self, record: Record, *, here: Array) -> Record:
        """Writes the tokens and their numbers into a record, at `here`, bool[B, W]."""
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

    stop_ids: tuple[int, ...]  # kept in the response
    temperature: float = 1.0  # divides the logits, dimensionless
    shaping: Shaping | None = None  # for evaluation only; None draws from the policy
    unused: Ranges = ()  # `ModelConfig.unused_ids`
    top_k: int | None = None  # likeliest tokens to record; None records none
    # Combines the logits of all decoders into those to draw from.
    hook: Callable[..., Array] = lambda logits: logits

    def __call__(
        self, *logits: Array, keys: Array, number: Array, predicted: Array | None = None
    ) -> Drawn:
        """Draws a token for every row, with fold_in(keys[b], number).

        Args:
          logits: f32[B, V] of every decoder.
          keys: key[B], of the rows.
          number: number of the token in its response, i32[] for all rows or i32[B].
          predicted: bool[B], rows with a token before it (`sample_token`); None: all.
        """
        # Folds in the token's number in its response: prompt width and waiting change
        # no draw. Recorded runs depend on this order of folding.
        fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, 0 if number.ndim else None))
        drawn_from = self.hook(*logits)
        token, logprob, entropy = sample_token(
            drawn_from,
            keys=fold_in(keys, number),
            temperature=self.temperature,
            shaping=self.shaping,
            predicted=predicted,
            unused=self.unused,
        )
        stops = jnp.isin(token, jnp.asarray(self.stop_ids, jnp.int32))
        top_k = None
        if self.top_k is not None:
            likely = logprobs.log_softmax(drawn_from, temperature=self.temperature)
            if predicted is not None:
                likely = jnp.where(predicted[:, None], likely, -jnp.inf)
            values, tokens = jax.lax.top_k(likely, self.top_k)
            top_k = TopK(*map(axes.rows_apart, (tokens, values)))
        return Drawn(token, logprob, entropy, stops, top_k=top_k)


def read_prompts(
    sampled: Decoder,
    *,
    tokens: Array,
    mask: Array,
    group_size: int,
    columns: int | None,
    end: Array | int,
) -> tuple[Array, Caches, Array | None]:
    """Runs prompts, for the logits after them and the caches of their columns.

    Args:
      tokens, mask: i32[B, P] and bool[B, P], left-padded.
      group_size: consecutive rows with one prompt, which is run once for all of them.
      columns, end: as in `caches.placed`; columns None leaves the caches unplaced.

    Returns:
      Logits f32[B, V], caches, and experts i32[B, P, L, k] if the decoder records them,
      else None.
    """
    params, model, _, record = sampled
    # One prompt of each group is run, and its cache repeated.
    last, kept, experts = prefill(
        params,
        model=model,
        tokens=tokens[::group_size],
        mask=mask[::group_size],
        record=record,
    )
    layers = unstack(kept, model=model)
    caches = tuple(next(iter(layer.values()), ()) for layer in layers)
    last, caches, experts = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, group_size, axis=0), (last, caches, experts)
    )
    if columns is not None:
        caches = placed(caches, model=model, columns=columns, end=end)
    # f32[B, V], only of the last column.
    logits = decoder.logits(params, last, model=model, spread=True)
    return logits, caches, experts


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
    going: Array,
) -> tuple[Drawn, tuple[Caches, ...]]:
    """Runs the token that every row drew last, and draws the next.

    Args:
      decoders, caches: decoders from `to_decode`, and the caches of each.
      tokens, positions: i32[B], these tokens and the number of tokens before each.
      attend, column: as in `decode_step`.
      draw, keys, number: as in `Draw.__call__`.
      going: bool[B], False for rows whose draw has no use.
    """
    logits, updated, experts = [], [], None
    for decoding, cache in zip(decoders, caches, strict=True):
        params, model, layers, record = decoding
        hidden, cache, chosen = cached_decoder.decode_step(
            params,
            layers=layers,
            model=model,
            tokens=tokens[:, None],
            positions=positions[:, None],
            attend=attend,
            caches=cache,
            column=column,
            going=going[:, None],
            record=record,
        )
        logits.append(decoder.logits(params, hidden[:, 0], model=model, spread=True))
        updated.append(cache)
        experts = experts if chosen is None else chosen[:, 0]
    drawn = draw(*logits, keys=keys, number=number)
    return drawn._replace(experts=experts), tuple(updated)


def run(
    state: State,
    *,
    advance: Callable[[State], State],
    more: Callable[[State], Array],
    axis: str | None = None,
) -> State:
    """Advances a state while there is more to do.

    Args:
      axis: axis of a `shard_map` along which all devices go on until none has more to
        do, as they must if `advance` has collectives; None: each stops by itself.
    """

    if axis is None:
        # A `while_loop`, not a scan: it ends with the longest response of the batch.
        return jax.lax.while_loop(more, advance, state)

    def any_more(state: State) -> Array:
        # Devices that share a collective in `advance` must take equally many turns.
        return jax.lax.psum(more(state), axis) > 0

    def turn(carry: tuple[State, Array]) -> tuple[State, Array]:
        state = advance(carry[0])
        return state, any_more(state)

    first = state, any_more(state)
    return jax.lax.while_loop(lambda carry: carry[1], turn, first)[0]
