"""The decoder as pure functions: parameters in, hidden states, logits or scores out.

    {"embed": {"tokens": [V', D], "positions": [N, D]},    learned positions only
     "layers": {...},                                      every leaf [n, ...] over the
                                                           n layers that have it
     "final_norm": {"scale": [D], "bias": [D]},
     "head": {"kernel": [V', D]}}                          untied heads only

V' is the vocabulary padded to `model.vocab_multiple`. A leaf may also be stored in
int8 or in host memory (`leaves.py`). `layers.py` loops over the layers of whole rows;
`cached_decoder.py` runs them on new tokens against a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, unused_ids
from rlhf_jax.functional.errors import refuse
from rlhf_jax.models import axes, blocks, layers, layout, leaves, per_layer
from rlhf_jax.models.axes import Cut
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import Given, Routing, routing_faults
from rlhf_jax.models.positions import AttentionMask, angles, mask_of, positions_of

Array = jax.Array
Params = Any  # nested dict of arrays


def init(key: Array, *, model: ModelConfig) -> Params:
    """Random float32 parameters: normal(0.02), residual outputs / sqrt(2 L).

    Source: Radford et al. 2019 (GPT-2), section 2.3.
    """
    # Always five keys: a model without learned positions or with a tied head draws the
    # same values for its other parameters.
    embed_key, position_key, layer_key, norm_key, head_key = jax.random.split(key, 5)
    x = jnp.zeros((1, 1, model.hidden_size), jnp.float32)
    norm = blocks.Norm(model)
    # The engine has no parameters, and kernels take neither float32 nor one token.
    plain = dataclasses.replace(model, attention="xla")

    def normal(key: Array, rows: int) -> Array:
        shape = (rows, model.hidden_size)
        return blocks.INIT_STD * jax.random.normal(key, shape, jnp.float32)

    def layer(key: Array, number: int = 0) -> Params:
        block = layers.block_of(plain, number)
        mask = AttentionMask(segments=jnp.ones((1, 1), jnp.int32))
        rotary = angles(jnp.zeros((1, 1), jnp.int32), model=block.model)
        others: dict[str, Any] = {}
        if model.per_layer_width is not None:
            others["per_layer"] = jnp.zeros((1, 1, model.per_layer_width), jnp.float32)
        if block.reads:
            own = block.model
            kept = jnp.zeros((1, own.num_kv_heads, 1, own.head_dim), jnp.float32)
            others["cache"] = kept, kept
        return block.init(key, x, mask=mask, rotary=rotary, **others)["params"]

    def all_layers() -> Params:
        keys = jax.random.split(layer_key, model.num_layers)
        if not model.by_kind:
            return jax.vmap(layer)(keys)
        return layers.stacked([layer(key, n) for n, key in enumerate(keys)])

    params = {
        "embed": {"tokens": normal(embed_key, model.padded_vocab_size)},
        # Stacked [L, ...] from the start, as the scan over layers reads them.
        "layers": all_layers(),
        "final_norm": norm.init(norm_key, x)["params"],
    }
    if model.positions == "learned":
        params["embed"]["positions"] = normal(position_key, model.max_positions)
    params["embed"] |= per_layer.tables(position_key, model=model)
    if not model.tied_head:
        params["head"] = {"kernel": normal(head_key, model.padded_vocab_size)}
    return params


@functools.cache
def shapes(model: ModelConfig) -> Params:
    """Shapes of the parameters that `init` makes, traced once per model."""
    made = jax.eval_shape(lambda key: init(key, model=model), jax.random.key(0))
    # Strips the mesh of the first call, which the cache would otherwise keep.
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made)


def num_parameters(model: ModelConfig) -> int:
    """Number of parameters with the true vocabulary; allocates no arrays."""
    copies = 1 if model.tied_head else 2
    width = copies * model.hidden_size + model.num_layers * (model.per_layer_width or 0)
    padding = (model.padded_vocab_size - model.vocab_size) * width
    return sum(leaf.size for leaf in jax.tree.leaves(shapes(model))) - padding


def hidden_states(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    segments: Array | None = None,
    prefixes: Array | None = None,
    first_column: int = 0,
    experts: Array | None = None,
) -> Array:
    """Hidden states after the final norm. A `context` mesh axis shares the columns.

        tokens       a  b  c  d  e  ·        two texts packed into one row
        segments     1  1  2  2  2  0
        positions    0  1  0  1  2  0
        c attends          c
        e attends          c  d  e

    Args:
      params: as in the module's docstring; the head is not read.
      tokens: i32[B, S], padded on either side; ids at padding are not read.
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], the number of a token's text in its row, 0 at padding. Each
        text is read as if it stood alone. None: one text per row.
      prefixes: i32[B, S], a segment further left that a token sees too; its positions
        continue from the end of that segment. 0 and None are none.
      first_column: hidden states of earlier columns come back as 0; with `model.unroll`
        the last layer does not compute them.
      experts: i32[B, S, L, k], for a mixture: the experts of each token, recorded by
        `hidden_and_routing`. -1 leaves a token to its router; None leaves all.

    Returns:
      [B, S, D] in `model.dtype`; `hidden[:, t]` has seen `tokens[:, :t + 1]` of its own
      segment. Values at padding are finite and have no meaning.

    Raises:
      ValueError: tokens, mask and segments differ in shape. InputError: there are more
        columns than learned positions (not checked with segments, where the tokens of a
        longer text share the last position), `prefixes` come with a sliding window or
        recurrent layers, or `experts` do not fit the tokens and the model.
    """
    rows = Rows(tokens, mask, segments, prefixes, experts)
    cut = axes.cut_of(tokens.shape[0])
    return _run(params, rows, model=model, first_column=first_column, cut=cut)[0]


def hidden_and_routing(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    segments: Array | None = None,
    prefixes: Array | None = None,
    first_column: int = 0,
    experts: Array | None = None,
) -> tuple[Array, Routing]:
    """`hidden_states` of a mixture, and the decisions of its routers.

    Returns:
      [B, S, D], and the routing. Its `chosen`, i32[B, S, L, k], can be the `experts` of
      another pass; it is -1 at columns that were not computed.

    Raises:
      ValueError, InputError: as `hidden_states`; or the model is dense.
    """
    rows = Rows(tokens, mask, segments, prefixes, experts)
    cut = axes.cut_of(tokens.shape[0])
    hidden, _, routing = _run(
        params, rows, model=model, first_column=first_column, cut=cut, record=True
    )
    assert routing is not None
    return hidden, routing


def prefill(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    first_column: int = 0,
    record: bool = False,
) -> tuple[Array, Any, Routing | None]:
    """`hidden_states` of one text per row, with the keys and values of every layer.

    Returns:
      [B, S, D]; {module: keys and values of all columns}, as `layers.run`, in
      `model.dtype`; with `record` the routing. Columns are never shared over a
      `context` mesh axis.

    Raises:
      ValueError, InputError: as `hidden_states`.
    """
    rows = Rows(tokens, mask)
    return _run(params, rows, model=model, first_column=first_column, record=record)


class Rows(NamedTuple):
    """The arguments of `hidden_states` that have a number per token."""

    tokens: Array
    mask: Array
    segments: Array | None = None
    prefixes: Array | None = None
    experts: Array | None = None


def _run(
    params: Params,
    rows: Rows,
    *,
    model: ModelConfig,
    first_column: int,
    cut: Cut | None = None,
    record: bool = False,
) -> tuple[Array, Any, Routing | None]:
    """As `prefill`; with a cut, keys and values are of the balanced parts of rows."""
    _check(rows, model=model)
    if record or rows.experts is not None:
        faults = routing_faults(model, rows.experts, tokens=rows.tokens, record=record)
        refuse(faults)
    if cut is not None:
        layout.refuse_context("auto", context=cut.count, model=model)
    columns = rows.tokens.shape[1]
    if cut is not None:
        room = cut.width(columns) - columns
        rows = jax.tree.map(lambda x: axes.padded(x, room), rows)
    tokens, mask, segments, prefixes, experts = rows
    # i32[B, S]. Only tokens count: left padding does not shift a prompt's positions.
    positions = positions_of(mask, segments=segments, prefixes=prefixes)
    attended = mask_of(
        mask,
        segments=segments,
        prefixes=prefixes,
        scale=model.query_scale,
        softcap=model.attention_softcap,
        cut=cut,
    )
    # Padding may hold any id: one out of range would be NaN, which no mask undoes.
    tokens = jnp.where(mask, tokens, 0)
    routed = Given(None if model.experts is None else mask, experts, record)
    if cut is not None:
        tokens, positions, routed = jax.tree.map(
            cut.balanced_parts, (tokens, positions, routed)
        )
    if routed.chosen is not None:
        of_layers = jnp.moveaxis(routed.chosen, 2, 0)
        routed = dataclasses.replace(routed, chosen=of_layers)
    x = embed(params, model=model, tokens=tokens, positions=positions)
    own_inputs = None
    if model.per_layer_width is not None:
        own_inputs = per_layer.inputs(params, x, model=model, tokens=tokens)
    x, keys_values, routing = layers.run(
        params["layers"],
        # Shards rows and not D: GSPMD could otherwise gather activations in place of
        # the weights.
        axes.rows_apart(x) if cut is None else cut.apart(x),
        model=model,
        mask=attended,
        positions=positions,
        first_column=first_column if cut is None else 0,
        experts=routed,
        per_layer=own_inputs,
    )
    if routing is not None:
        chosen = jnp.moveaxis(routing.chosen, 0, 2)
        if cut is not None:
            chosen = cut.whole_of_balanced(chosen)[:, :columns]
        routing = dataclasses.replace(routing, chosen=chosen)
    hidden = final_norm(params, x, model=model)
    if cut is None:
        # Zeros stand for columns that were not computed, so that column t stays t.
        hidden = jnp.pad(hidden, ((0, 0), (first_column, 0), (0, 0)))
        return hidden, keys_values, routing
    hidden = cut.whole_of_balanced(hidden)[:, :columns]
    predicted = jnp.arange(columns, dtype=jnp.int32) >= first_column
    return jnp.where(predicted[None, :, None], hidden, 0), keys_values, routing


def _check(rows: Rows, *, model: ModelConfig) -> None:
    checks.shape((None, None), tokens=rows.tokens)
    checks.same_shape(tokens=rows.tokens, mask=rows.mask)
    if rows.segments is not None:
        checks.same_shape(tokens=rows.tokens, segments=rows.segments)
    elif model.positions == "learned":
        checks.within(
            most=model.max_positions,
            advice="the model has no more learned positions: shorten prompts or "
            "responses",
            columns=rows.tokens.shape[1],
        )
    if rows.prefixes is not None:
        refuse(_faults_of_prefixes(model))


def _faults_of_prefixes(model: ModelConfig) -> Iterator[str]:
    if model.sliding_window is not None:
        yield (
            f"expected a model without a sliding window for texts that share a prefix, "
            f"got one of {model.sliding_window} tokens, which would count columns of "
            f"other texts; let no texts share one"
        )
    if model.recurrent_layers:
        yield (
            "expected a model without recurrent layers for texts that share a prefix, "
            "got one with them, whose state after a prefix only one text can continue; "
            "let no texts share one"
        )


def embed(
    params: Params, *, model: ModelConfig, tokens: Array, positions: Array
) -> Array:
    """Embeddings [B, T, D] of tokens and positions i32[B, T], in `model.dtype`."""
    embed = params["embed"]
    x = leaves.rows(embed["tokens"], tokens).astype(model.dtype)
    if model.embed_scale != 1.0:
        x = x * jnp.asarray(model.embed_scale, model.dtype)
    if model.positions == "learned":
        # Right padding counts past the last token; its rows are never read.
        within = jnp.minimum(positions, model.max_positions - 1)
        x = x + leaves.rows(embed["positions"], within).astype(model.dtype)
    return x


def final_norm(params: Params, x: Array, *, model: ModelConfig) -> Array:
    """The norm after the last layer, of hidden states [..., D]."""
    norm = leaves.read(params["final_norm"])
    y: Any = blocks.Norm(model).apply({"params": norm}, x)
    return y


def vocabulary_head(params: Params, *, model: ModelConfig) -> Array:
    """[V', D], the output head: the token embedding when the two are tied."""
    head = params["embed"]["tokens"] if model.tied_head else params["head"]["kernel"]
    return leaves.read(head)


def read_by_head(hidden: Array, *, model: ModelConfig) -> Array:
    """The input of the output head: hidden states over `model.logit_divisor`."""
    if model.logit_divisor == 1.0:
        return hidden
    # Dividing here spares every reader of chunked logits the division.
    return hidden / jnp.asarray(model.logit_divisor, hidden.dtype)


def logits(
    params: Params, hidden: Array, *, model: ModelConfig, spread: bool = False
) -> Array:
    """f32[..., V] over the true vocabulary, accumulated in float32 and soft-capped.

    Ids without a token (`model.unused_ids`) are -inf.

    Args:
      hidden: [..., D], after the final norm.
      spread: also shards whole rows over the devices that share the vocabulary
        (`axes.rows_spread`), so that a draw from a row is local.
    """
    # Products in the compute dtype; `preferred_element_type` below sums them in
    # float32.
    head = vocabulary_head(params, model=model).astype(hidden.dtype)
    rows = read_by_head(hidden, model=model).reshape(-1, hidden.shape[-1])
    if rows.shape[0] <= model.transposed_rows:
        padded = layout.transposed_product(rows, head)
    else:
        padded = jnp.matmul(rows, head.T, preferred_element_type=jnp.float32)
    if spread:
        padded = axes.rows_spread(padded)
    # Padded ids (a multiple of 128, for sharding) must never be drawn or normalised
    # over.
    logits = padded[:, : model.vocab_size]
    if model.logit_softcap is not None:
        logits = model.logit_softcap * jnp.tanh(logits / model.logit_softcap)
    if model.unused_ids:
        logits = unused_ids.masked(logits, model.unused_ids)
    return logits.reshape(*hidden.shape[:-1], model.vocab_size)


def init_score(key: Array, *, model: ModelConfig) -> Params:
    """A scalar head ~ N(0, 1/(D+1)), bias 0, for a reward model.

    Source: Stiennon et al. 2020, arXiv:2009.01325, appendix B.1.
    """
    std = 1 / math.sqrt(model.hidden_size + 1)
    kernel = std * jax.random.normal(key, (model.hidden_size,), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros((), jnp.float32)}


def zero_score(*, model: ModelConfig) -> Params:
    """A scalar head of zeros, for a critic that starts at value 0 everywhere.

    Source: Ziegler et al. 2019, arXiv:1909.08593 (lm-human-preferences).
    """
    return {
        "kernel": jnp.zeros((model.hidden_size,), jnp.float32),
        "bias": jnp.zeros((), jnp.float32),
    }


def scores(params: Params, hidden: Array) -> Array:
    """f32[...]: hidden · kernel + bias, in float32."""
    params = leaves.read(params)
    kernel = params["kernel"].astype(jnp.float32)
    # Scores are compared with each other, and bfloat16 has three digits.
    rows = hidden.astype(jnp.float32).reshape(-1, hidden.shape[-1])
    flat = rows @ kernel + params["bias"].astype(jnp.float32)
    return flat.reshape(hidden.shape[:-1])
