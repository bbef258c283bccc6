"""The layers of a decoder over whole rows, and stacked layers taken apart.

`lax.scan` runs over stacked layers, every leaf [L, ...]; with `model.unroll` each layer
is an operation of its own. Where some layers have modules that others lack, the leaves
of a module are stacked over the layers that have it, and the scan is over periods:

    layer          0 1 2 3  4 5 6 7        a: attention, d: a DeltaNet
    has            d d d a  d d d a        attention [2, ...], delta_net [6, ...],
    turn of scan   0 0 0 0  1 1 1 1        mlp [8, ...]

A layer that is stored in int8 or on the host (`leaves.py`) is read when its turn comes.
`cached_decoder.py` runs layers on new tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.models import axes, blocks, leaves
from rlhf_jax.models.config import ModelConfig, Remat
from rlhf_jax.models.experts import NOTHING, Given, Routing
from rlhf_jax.models.experts.routing import ROUTING
from rlhf_jax.models.positions import AttentionMask, angles, unless

Array = jax.Array
Params = Any  # nested dict of arrays
Sight = tuple[Any, Any]  # the mask and the rotary table that a `Block` reads

POLICIES: dict[Remat, Callable[..., Any]] = {
    # Every projection is a matrix product; attention's two have batch dimensions. The
    # weights of a layer stored in int8 or on the host come from no product, and so are
    # never kept.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What a gradient keeps of a layer besides its input, by `model.remat`."""


class Sights(NamedTuple):
    """What the layers of each kind attend to."""

    everything: Sight  # of layers that see all columns
    window: Sight  # of local layers
    recurrent: Any  # the mask of recurrent layers, which have no positions

    def of(self, layer: int, *, model: ModelConfig) -> Sight:
        """The mask and the rotary table of a layer, from 0."""
        if model.is_recurrent(layer):
            return self.recurrent, None
        mask, rotary = self.window if model.is_local(layer) else self.everything
        return mask, None if model.is_unrotated(layer) else rotary


def run(
    layers: Params,
    x: Array,
    *,
    model: ModelConfig,
    mask: AttentionMask,
    positions: Array,
    first_column: int = 0,
    experts: Given = NOTHING,
    per_layer: Array | None = None,
) -> tuple[Array, Any, Routing | None]:
    """Runs all layers, one after another.

    Args:
      x: [B, S, D] in `model.dtype`, the embeddings.
      mask: of S columns. With a cut x and positions are the balanced parts of rows,
        [B·c, S/c, ...].
      first_column: earlier columns are left out of the hidden states; with
        `model.unroll` the last layer does not compute them.
      experts: for a mixture, its tokens and which experts to replay or record.
      per_layer: [L, B, S, P], from `per_layer.inputs`.

    Returns:
      [B, S - first_column, D] before the final norm; what the n layers with a module
      keep of all columns, {"attention": keys and values [n, B, K, S, head_dim],
      "delta_net": states [n, B, ...]}; and, if `experts` asks for it, the `Routing` of
      B x S tokens, which records nothing for columns that were not computed.
    """
    # Tables once for all layers, and not in every turn of the scan.
    everything = mask, angles(positions, model=model)
    window = everything
    if model.sliding_window is not None:
        # The tokens of a text are neighbours: a distance in columns is one in tokens.
        near = dataclasses.replace(mask, window=model.sliding_window)
        window = near, angles(positions, model=model, local=True)
    sights = Sights(everything, window, recurrent=mask)
    stored = leaves.any_stored(layers)
    unroll = model.unroll and not stored
    # A gradient (to adapters beside such a base) would keep every layer as it was read,
    # which is the whole model; it reads them again instead.
    remat = "full" if model.remat == "none" and stored else model.remat

    inputs = {"per_layer": per_layer, "chosen": experts.chosen}
    # Layers with the same modules share one loop: arrays say which is what.
    together = not model.by_kind and not unroll
    if together:
        if any(model.local_layers) and not all(model.local_layers):
            inputs["local"] = jnp.asarray(model.local_layers)
        if model.unrotated_layers:
            inputs["unrotated"] = jnp.asarray(model.unrotated_layers)
    # Global layers get a window of all columns, which hides nothing.
    size = mask.columns
    widths = size if model.sliding_window is None else model.sliding_window, size

    def sight_of(number: int, inputs: dict[str, Array]) -> Sight:
        if not together:
            return sights.of(number, model=model)
        own: Any
        rotary: Any
        own, rotary = window if all(model.local_layers) else everything
        if "local" in inputs:
            local = inputs["local"]
            rotary = jax.tree.map(
                lambda narrow, wide: jnp.where(local, narrow, wide), window[1], rotary
            )
            # The width is traced, as the loop has one body; `windows` has its two
            # values, for engines whose windows are static.
            width = jnp.where(local, *widths)
            own = dataclasses.replace(own, window=width, windows=widths)
        if "unrotated" in inputs:
            rotary = unless(inputs["unrotated"], rotary)
        return own, rotary

    def one(
        x: Array, layer: Sequence[Params], number: int, shared: Any
    ) -> tuple[Array, Any]:
        # Earlier layers compute every column: later columns attend to them.
        last = unroll and number == model.num_layers - 1

        def run(x: Array, params: Params, inputs: dict[str, Array], cache: Any) -> Any:
            mask, rotary = sight_of(number, inputs)
            return (_jitted_layer if unroll else _layer)(
                x,
                params,
                dataclasses.replace(experts, chosen=inputs.get("chosen")),
                inputs.get("per_layer"),
                cache,
                block=block_of(model, number),
                mask=dataclasses.replace(mask, window=None),
                window=mask.window,
                rotary=rotary,
                first=first_column if last else 0,
            )

        if remat != "none":
            # Only a loop keeps the two forward passes apart by itself.
            policy = POLICIES[remat]
            run = jax.checkpoint(run, policy=policy, prevent_cse=model.unroll)
        cache = shared.get(model.is_local(number))
        params, inputs = layer
        x, (kept, routing) = run(x, params, inputs, cache)
        kept = {model.mixer(number): kept} if cache is None else {}
        return x, kept if routing is None else {**kept, ROUTING: routing}

    stacks = layers, {k: leaf for k, leaf in inputs.items() if leaf is not None}
    x, kept = in_periods(one, x, stacks, model=model, unroll=unroll)
    routing = kept.pop(ROUTING, None)
    return x if unroll else x[:, first_column:], kept, routing


def _layer(
    x: Array,
    params: Params,
    experts: Given,
    per_layer: Array | None,
    cache: Any,
    *,
    block: blocks.Block,
    mask: AttentionMask,
    window: Array | int | None,  # of the mask: `jit` would trace an int there
    rotary: Any,
    first: int,
) -> tuple[Array, Any]:
    mask = dataclasses.replace(mask, window=window)
    (y, kept), routing = blocks.apply(
        block,
        leaves.read(params),
        x,
        experts=experts,
        first=first,
        mask=mask,
        rotary=rotary,
        cache=cache,
        per_layer=per_layer,
    )
    y = axes.rows_apart(y) if mask.cut is None else mask.cut.apart(y)
    return y, (kept, routing)


# Jitted to save tracing: JAX caches the trace, so that a program with six layers, or
# with a branch for each size of packed rows, does not trace the same lines again.
# Compilers inline the call.
_jitted_layer = jax.jit(_layer, static_argnames=("block", "window", "first"))


def block_of(model: ModelConfig, layer: int) -> blocks.Block:
    """The block of a layer, from 0."""
    if not model.is_recurrent(layer):
        return blocks.Block(
            model.at(layer),
            attention=model.mixer(layer),
            mlp=model.mlp(layer),
            reads=model.source(layer) is not None,
        )
    # Imported only for models that have it.
    from rlhf_jax.models.delta_net import GatedDeltaNet

    return blocks.Block(model, GatedDeltaNet)


def in_periods(
    one: Callable[..., tuple[Array, Any]],
    x: Array,
    stacks: Sequence[Params],
    *,
    model: ModelConfig,
    unroll: bool = False,
) -> tuple[Array, Any]:
    """Runs x through all layers, one period of them per turn of a scan.

    Layers of one kind that follow each other in a period are a scan in that turn, so
    that compilers meet each kind once; with `unroll` they stay one by one.

    Args:
      one: one(x, layer, number=, shared=) of the layer's part of each stack, the number
        of a layer of its kind, and {whether local: keys and values to read}, empty but
        for shared layers; returns x and {module: output to keep}.
      stacks: each is {module: leaves stacked over the layers that have it}.
      unroll: runs layers one by one.

    Returns:
      x, and {module: outputs, stacked over the layers that have it}.
    """
    all_kept: dict[str, Any] = {}
    sizes = [count for _, count, _ in model.parts]
    of_parts = _by_runs(stacks, sizes, model=model, first=0)
    for (first, count, period), own in zip(model.parts, of_parts, strict=True):
        shared = {
            model.is_local(n): _of_layer(all_kept, n, model=model)
            for n in map(model.source, range(first, first + count))
            if n is not None
        }
        loop = period == 1 and not unroll  # over layers of one kind
        period = count if unroll else period
        turn = functools.partial(
            _period,
            one,
            model=model,
            first=first,
            runs=[1] * period if unroll else _runs(model, first=first, layers=period),
            shared=shared,
        )
        if loop:
            of_kind = functools.partial(one, number=first, shared=shared)
            x, kept = jax.lax.scan(of_kind, x, own)
        elif count == period:
            x, kept = turn(x, own)
        else:
            turns = count // period
            apart = jax.tree.map(
                lambda leaf, n=turns: leaf.reshape(n, -1, *leaf.shape[1:]), own
            )
            x, kept = jax.lax.scan(turn, x, apart)
            kept = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)
        all_kept = joined([all_kept, kept])
    return x, all_kept


def _period(
    one: Callable[..., tuple[Array, Any]],
    x: Array,
    stacks: Sequence[Params],
    *,
    model: ModelConfig,
    first: int,
    runs: Sequence[int],
    shared: Any,
) -> tuple[Array, Any]:
    """Runs x through a period of layers from the first, each run of one kind a scan."""
    kept = []
    of_runs = _by_runs(stacks, runs, model=model, first=first)
    for size, run in zip(runs, of_runs, strict=True):
        of_kind = functools.partial(one, number=first, shared=shared)
        if size == 1:
            x, of_layer = of_kind(x, jax.tree.map(lambda leaf: leaf.squeeze(0), run))
            of_run = jax.tree.map(lambda leaf: leaf[None], of_layer)
        else:
            x, of_run = jax.lax.scan(of_kind, x, run)
        kept.append(of_run)
        first += size
    return x, joined(kept)


def _of_layer(kept: Params, layer: int, *, model: ModelConfig) -> Any:
    """The part of one layer of {module: outputs, stacked over the layers with it}."""
    module = model.mixer(layer)
    at = model.layers_of(module).index(layer)
    return jax.tree.map(lambda leaf: leaf[at], kept[module])


def _runs(model: ModelConfig, *, first: int, layers: int) -> list[int]:
    """Lengths of the runs of layers of one kind, of some layers from the first.

    Two DeltaNets and attention, twice: 2, 1, 2, 1.
    """
    kinds = map(model.kind, range(first, first + layers))
    return [len(list(run)) for _, run in itertools.groupby(kinds)]


def _by_runs(
    stacks: Sequence[Params], runs: Sequence[int], *, model: ModelConfig, first: int
) -> list[Sequence[Params]]:
    """For each run, {module: leaves [n, ...]} of its n layers from each stack."""
    if len(runs) == 1:
        return [stacks]
    bounds = [first + end for end in itertools.accumulate(runs, initial=0)]

    def of(stack: Params) -> list[Params]:
        parts: list[Params] = [{} for _ in runs]
        for module, tree in stack.items():
            has = model.layers_of(module)
            places = [sum(n < bound for n in has) for bound in bounds]
            counts = [stop - start for start, stop in itertools.pairwise(places)]
            leaves, structure = jax.tree.flatten(tree)
            # The gradient of a split is one concatenation.
            split = [jax.lax.split(leaf, counts, axis=0) for leaf in leaves]
            for at, count in enumerate(counts):
                if count:
                    parts[at][module] = structure.unflatten([x[at] for x in split])
        return parts

    return [list(run) for run in zip(*map(of, stacks), strict=True)]


def joined(runs: Sequence[Params]) -> Params:
    """Concatenates runs of layers, {module: leaves [n, ...]} over all their layers."""
    modules = dict.fromkeys(module for run in runs for module in run)
    return {
        module: jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves),
            *(run[module] for run in runs if module in run),
        )
        for module in modules
    }


def stacked(layers: Sequence[Params]) -> Params:
    """Stacks layers, {module: leaves [n, ...]} over the n that have the module."""
    return joined([jax.tree.map(lambda leaf: leaf[None], layer) for layer in layers])


def unstack(stacks: Params, *, model: ModelConfig) -> tuple[Params, ...]:
    """Takes stacked layers (or what they keep) apart, once, before a decode loop.

    Args:
      stacks: {module: leaves [n, ...] of the n layers that have it}.
    """
    layers: list[Params] = [{} for _ in range(model.num_layers)]
    for module, stack in stacks.items():
        numbers = model.layers_of(module)
        for number, part in zip(numbers, _split(stack, len(numbers)), strict=True):
            layers[number][module] = part
    return tuple(layers)


def _split(tree: Any, count: int) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    # The gradient of a split is one concatenation; that of L slices would be a sum of L
    # arrays as large as the whole.
    split = [jax.lax.split(leaf, (1,) * count, axis=0) for leaf in leaves]
    return tuple(
        structure.unflatten([jnp.squeeze(part, 0) for part in parts])
        for parts in zip(*split, strict=True)
    )
