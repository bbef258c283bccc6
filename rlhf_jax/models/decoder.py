"""The decoder as pure functions: parameters in, hidden states out.

    {"embed": {"tokens": [V', D], "positions": [N, D]},    learned positions only
     "layers": {...},                                      every leaf [L, ...]
     "final_norm": {"scale": [D], "bias": [D]},
     "head": {"kernel": [V', D]}}                          untied heads only

V' is the vocabulary padded to `model.vocab_multiple`. A leaf may also be stored in
int8 or in host memory (`leaves.py`): each layer is read when its turn comes. The loop
over layers is here, `lax.scan` over the stacked layers, and in `cached_decoder.py`, a
Python loop over layers that `unstack` took apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes, blocks, context, leaves
from rlhf_jax.models.attention import AttentionMask, KeyValue, mask_of
from rlhf_jax.models.config import ModelConfig, Remat
from rlhf_jax.models.context import Cut
from rlhf_jax.models.rotary import rotary_table

Array = jax.Array
Params = Any  # nested dict of arrays
Sight = tuple[AttentionMask, Any]  # what is attended to, and the rotary table

KEPT: dict[Remat, Callable[..., Any]] = {
    # Every projection is a matrix product; attention's two have batch dimensions. A
    # layer that is stored in int8 or on the host is read by no product: never kept.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What a gradient keeps of a layer beside its input, by the name of `model.remat`."""


def init(key: Array, *, model: ModelConfig) -> Params:
    """Random float32 parameters: normal(0.02), residual outputs / sqrt(2 L).

    Source: Radford et al. 2019 (GPT-2), section 2.3.
    """
    embed_key, position_key, layer_key, norm_key, head_key = jax.random.split(key, 5)
    x = jnp.zeros((1, 1, model.hidden_size), jnp.float32)
    norm = blocks.Norm(model)
    # Attention has no parameters, and a kernel takes neither float32 nor one token.
    block = blocks.Block(dataclasses.replace(model, attention="xla"))

    def normal(key: Array, rows: int) -> Array:
        shape = (rows, model.hidden_size)
        return blocks.INIT_STD * jax.random.normal(key, shape, jnp.float32)

    def layer(key: Array) -> Params:
        mask = AttentionMask(segments=jnp.ones((1, 1), jnp.int32))
        rotary = angles(jnp.zeros((1, 1), jnp.int32), model=model)
        return block.init(key, x, mask=mask, rotary=rotary)["params"]

    params = {
        "embed": {"tokens": normal(embed_key, model.padded_vocab_size)},
        "layers": jax.vmap(layer)(jax.random.split(layer_key, model.num_layers)),
        "final_norm": norm.init(norm_key, x)["params"],
    }
    if model.positions == "learned":
        params["embed"]["positions"] = normal(position_key, model.max_positions)
    if not model.tied_head:
        params["head"] = {"kernel": normal(head_key, model.padded_vocab_size)}
    return params


def num_parameters(model: ModelConfig) -> int:
    """Number of parameters with the true vocabulary; allocates none of them."""
    shapes = jax.eval_shape(lambda key: init(key, model=model), jax.random.key(0))
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size
    copies = 1 if model.tied_head else 2
    return sum(leaf.size for leaf in jax.tree.leaves(shapes)) - copies * padding


def positions_of(
    mask: Array, *, segments: Array | None = None, prefixes: Array | None = None
) -> Array:
    """How many tokens of its text stand before each column; padding does not count.

        mask         0  0  1  1  1  0
        positions    0  0  0  1  2  3

        segments     0  1  1  2  2  0
        positions    0  0  1  0  1  0

        segments     1  1  2  2  3  3        2 and 3 go on where 1 ends
        prefixes     0  0  1  1  1  1
        positions    0  1  2  3  2  3

    Args:
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], each text in columns side by side; None is one text per row.
      prefixes: i32[B, S], the text whose end a text goes on from; 0 and None are none.

    Returns:
      i32[B, S].
    """
    count = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - mask.astype(jnp.int32)
    if segments is None:
        return count
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    # The count never falls: the largest at a beginning so far is the last one's.
    own = count - jax.lax.cummax(jnp.where(begins, count, 0), axis=1)
    if prefixes is None:
        return own
    rows = jnp.arange(mask.shape[0], dtype=jnp.int32)[:, None]
    lengths = jnp.zeros((mask.shape[0], mask.shape[1] + 1), jnp.int32)
    lengths = lengths.at[rows, segments].add(jnp.where(segments > 0, 1, 0))
    return own + jnp.take_along_axis(lengths, prefixes, axis=1)


def hidden_states(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    segments: Array | None = None,
    prefixes: Array | None = None,
    first_column: int = 0,
) -> Array:
    """Hidden states after the final norm; on a mesh with `context` cut over columns.

        tokens       a  b  c  d  e  ·        two texts packed into one row
        segments     1  1  2  2  2  0
        positions    0  1  0  1  2  0
        c attends          c
        e attends          c  d  e

    Args:
      params: as above (a head is not read).
      tokens: i32[B, S], padded on either side; what stands at padding is not read.
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], which text of the row a token is of, 0 at padding: each text
        is read as if it stood alone. None is one text a row.
      prefixes: i32[B, S], a segment further left that a token sees too, and from whose
        end its positions go on: texts with one beginning. 0 and None are none.
      first_column: hidden states of earlier columns are not wanted and come back as 0;
        with `model.unroll` the last layer does not compute them.

    Returns:
      [B, S, D] in `model.dtype`; `hidden[:, t]` has seen `tokens[:, :t + 1]`, of its
      segment alone. Finite and without meaning at padding.

    Raises:
      InputError: tokens, mask and segments differ in shape, or there are more columns
        than learned positions. With segments that is not known here: of a longer text
        the tokens beyond all take the last position.
    """
    _check(model=model, tokens=tokens, mask=mask, segments=segments, prefixes=prefixes)
    rows, columns = tokens.shape
    cut = context.cut_of(rows)
    if cut is None:
        hidden, _ = _run(
            params,
            model=model,
            tokens=tokens,
            mask=mask,
            segments=segments,
            prefixes=prefixes,
            first_column=first_column,
        )
        return hidden
    room = cut.width(columns) - columns
    tokens, mask = (context.padded(x, room) for x in (tokens, mask))
    segments = None if segments is None else context.padded(segments, room)
    hidden, _ = _run(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        segments=segments,
        prefixes=prefixes,
        cut=cut,
    )
    hidden = cut.whole_of_balanced(hidden)[:, :columns]
    wanted = jnp.arange(columns, dtype=jnp.int32) >= first_column
    return jnp.where(wanted[None, :, None], hidden, 0)


def prefill(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    segments: Array | None = None,
    prefixes: Array | None = None,
    first_column: int = 0,
) -> tuple[Array, KeyValue]:
    """Hidden states of whole rows, and keys and values of every layer for a cache.

    Args:
      params: the decoder's.
      model: static shape.
      tokens: i32[B, S], padded on either side; what stands at padding is not read.
      mask: bool[B, S], True at tokens.
      segments: i32[B, S], which text of the row a token is of, 0 at padding; None is
        one text per row.
      prefixes: i32[B, S], a segment further left that a token sees too; None is none.
      first_column: hidden states of earlier columns come back as 0.

    Returns:
      [B, S, D], and keys and values [L, B, K, S, head_dim] each, in `model.dtype`,
      of all columns.

    Raises:
      InputError: tokens, mask and segments differ in shape, or there are more columns
        than learned positions.
    """
    _check(model=model, tokens=tokens, mask=mask, segments=segments, prefixes=prefixes)
    return _run(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        segments=segments,
        prefixes=prefixes,
        first_column=first_column,
    )


def _run(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    segments: Array | None,
    prefixes: Array | None,
    first_column: int = 0,
    cut: Cut | None = None,
) -> tuple[Array, KeyValue]:
    """`prefill`; with a cut, which divides the columns, of the balanced parts of rows.

    Returns:
      [B·c, S/c, D], and keys and values [L, B·c, K, S/c, head_dim] each.
    """
    size = tokens.shape[1]
    positions = positions_of(mask, segments=segments, prefixes=prefixes)
    attended = mask_of(
        mask,
        segments=segments,
        prefixes=prefixes,
        scale=model.query_scale,
        softcap=model.attention_softcap,
        cut=cut,
    )
    apart = axes.rows_apart
    if cut is not None:
        apart = cut.apart
        tokens, mask, positions = map(cut.balanced_parts, (tokens, mask, positions))
    everything = attended, angles(positions, model=model)
    window = everything
    if model.sliding_window is not None:
        # The tokens of a text stand side by side, so that columns count them.
        near = dataclasses.replace(attended, window=model.sliding_window)
        window = near, angles(positions, model=model, local=True)

    def layer(
        x: Array, params: Params, *, sight: Sight, first: int = 0
    ) -> tuple[Any, Any]:
        mask, rotary = sight
        y, key_value = blocks.Block(model).apply(
            {"params": leaves.read(params)},
            x,
            mask=mask,
            rotary=rotary,
            first=first,
        )
        return apart(y), key_value

    remat = model.remat
    if remat == "none" and leaves.any_stored(params["layers"]):
        # A gradient (to adapters beside such a base) would keep what every layer was
        # read as, which is the whole model; it reads them again instead.
        remat = "full"

    def rematerialised(run: Callable[..., Any]) -> Callable[..., Any]:
        if remat == "none":
            return run
        # Only a loop keeps the two passes apart by itself.
        return jax.checkpoint(run, policy=KEPT[remat], prevent_cse=model.unroll)

    # Padding may hold any id: one out of range would be NaN, which no mask undoes.
    tokens = jnp.where(mask, tokens, 0)
    x = embed(params, model=model, tokens=tokens, positions=positions)
    x = apart(x)
    if model.unroll and not leaves.any_stored(params["layers"]):
        *before, last = enumerate(
            unstack(params["layers"], num_layers=model.num_layers)
        )
        earlier = []
        for number, one in before:
            sight = window if model.is_local(number) else everything
            x, key_value = rematerialised(functools.partial(layer, sight=sight))(x, one)
            earlier.append(key_value)
        number, one = last
        sight = window if model.is_local(number) else everything
        final = functools.partial(layer, sight=sight, first=first_column)
        x, key_value = rematerialised(final)(x, one)
        key_values = jax.tree.map(lambda *each: jnp.stack(each), *earlier, key_value)
    else:
        mixed = any(model.local_layers) and not all(model.local_layers)
        local = jnp.asarray(model.local_layers) if mixed else None
        # A window of all columns hides nothing.
        widths = size if model.sliding_window is None else model.sliding_window, size

        def scanned(x: Array, one: tuple[Params, Any]) -> tuple[Any, Any]:
            params, local = one
            sight = window if all(model.local_layers) else everything
            if local is not None:
                width = jnp.where(local, *widths)
                rotary = jax.tree.map(
                    lambda narrow, wide: jnp.where(local, narrow, wide),
                    window[1],
                    everything[1],
                )
                either = dataclasses.replace(attended, window=width, windows=widths)
                sight = either, rotary
            return layer(x, params, sight=sight)

        x, key_values = jax.lax.scan(
            rematerialised(scanned), x, (params["layers"], local)
        )
        x = x[:, first_column:]
    hidden = final_norm(params, x, model=model)
    return jnp.pad(hidden, ((0, 0), (first_column, 0), (0, 0))), key_values


def _check(
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    segments: Array | None,
    prefixes: Array | None,
) -> None:
    if tokens.ndim != 2 or tokens.shape != mask.shape:
        raise InputError(
            f"expected tokens and mask of one shape [B, S], got {tokens.shape} and "
            f"{mask.shape}"
        )
    if segments is not None and segments.shape != tokens.shape:
        raise InputError(
            f"expected segments of the shape of tokens, {tokens.shape}, got "
            f"{segments.shape}"
        )
    learned = model.positions == "learned" and segments is None
    if learned and tokens.shape[1] > model.max_positions:
        raise InputError(
            f"expected at most {model.max_positions} columns (the model's learned "
            f"positions), got {tokens.shape[1]}; shorten prompts or responses"
        )
    if prefixes is not None and model.sliding_window is not None:
        raise InputError(
            f"expected a model without a sliding window for texts that share a prefix, "
            f"got one of {model.sliding_window} tokens, which columns would not count; "
            f"let no texts share one"
        )


def unstack(tree: Any, *, num_layers: int) -> tuple[Any, ...]:
    """Takes stacked layers (or caches) apart, once, before a decode loop.

    Args:
      tree: pytree whose leaves are [L, ...].
      num_layers: L.

    Returns:
      L pytrees of [...] leaves.
    """
    leaves, structure = jax.tree.flatten(tree)
    # Of a split the gradient is one concatenation; of L slices it would be a sum of L
    # arrays as large as the whole.
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return tuple(
        structure.unflatten([jnp.squeeze(part, 0) for part in parts])
        for parts in zip(*split, strict=True)
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


def angles(
    positions: Array, *, model: ModelConfig, local: bool = False
) -> tuple[Array, Array] | None:
    """`rotary_table` of positions i32[B, T]; None where positions are learned."""
    if model.positions == "learned":
        return None
    return rotary_table(positions, model=model, local=local)


def final_norm(params: Params, x: Array, *, model: ModelConfig) -> Array:
    """The norm after the last layer, of hidden states [..., D]."""
    norm = leaves.read(params["final_norm"])
    y: Any = blocks.Norm(model).apply({"params": norm}, x)
    return y
