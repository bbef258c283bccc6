"""The layers of a decoder over whole rows, and stacked layers taken apart.

`lax.scan` runs over stacked layers, [L, ...] a leaf; with `model.unroll` each layer is
an operation of its own. Where some layers have modules that others lack, the leaves of
a module are stacked over the layers that have it, and the scan is over periods:

    layer          0 1 2 3  4 5 6 7        a: attention, d: a DeltaNet
    has            d d d a  d d d a        attention [2, ...], delta_net [6, ...],
    turn of scan   0 0 0 0  1 1 1 1        mlp [8, ...]

A layer that is stored in int8 or on the host (`leaves.py`) is
read when its turn comes. `cached_decoder.py` runs layers on new tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import axes, blocks, leaves
from rlhf_jax.models.attention import AttentionMask
from rlhf_jax.models.config import ModelConfig, Remat
from rlhf_jax.models.experts import NOTHING, Given, Routing
from rlhf_jax.models.positions import angles, unless

Array = jax.Array
Params = Any  # nested dict of arrays
Sight = tuple[AttentionMask, Any]  # what is attended to, and the rotary table

POLICIES: dict[Remat, Callable[..., Any]] = {
    # Every projection is a matrix product; attention's two have batch dimensions. A
    # layer that is stored in int8 or on the host is read by no product: never kept.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What a gradient keeps of a layer beside its input, by the name of `model.remat`."""


def run(
    layers: Params,
    x: Array,
    *,
    model: ModelConfig,
    mask: AttentionMask,
    positions: Array,
    first_column: int = 0,
    experts: Given = NOTHING,
) -> tuple[Array, Any, Routing | None]:
    """All layers, one after another.

    Args:
      x: [B, S, D] in `model.dtype`, the embeddings.
      mask: of S columns. With a cut x and positions are the balanced parts of rows,
        [B·c, S/c, ...].
      first_column: earlier columns are left out of the hidden states; with
        `model.unroll` the last layer does not compute them.
      experts: of a mixture, of the shape of x.

    Returns:
      [B, S - first_column, D] before the final norm, keys and values
      [L, B, K, S, head_dim] each, of all columns, and the `Routing` of B x S tokens if
      `experts` asks for it; of columns that were not computed nothing is recorded. With
      recurrent layers the second is {"attention": keys and values, "delta_net":
      states}, [n, B, ...] each.
    """
    # Tables once for all layers, and not in every turn of the scan.
    everything = mask, angles(positions, model=model)
    window = everything
    if model.sliding_window is not None:
        # The tokens of a text stand side by side, so that columns count them.
        near = dataclasses.replace(mask, window=model.sliding_window)
        window = near, angles(positions, model=model, local=True)
    stored = leaves.any_stored(layers)
    # A gradient (to adapters beside such a base) would keep what every layer was read
    # as, which is the whole model; it reads them again instead.
    remat = "full" if model.remat == "none" and stored else model.remat

    def rematerialised(run: Callable[..., Any]) -> Callable[..., Any]:
        if remat == "none":
            return run
        # Only a loop keeps the two passes apart by itself.
        return jax.checkpoint(run, policy=POLICIES[remat], prevent_cse=model.unroll)

    if model.recurrent_layers:

        def of_kinds(x: Array, layer: Sequence[Params], number: int) -> tuple[Any, Any]:
            sight = window if model.is_local(number) else everything
            if model.is_unrotated(number):
                sight = sight[0], None
            recurrent = model.is_recurrent(number)
            own = functools.partial(
                _layer, model=model, sight=sight, recurrent=recurrent
            )
            x, (kept, _) = rematerialised(own)(x, layer[0], NOTHING)
            return x, {"delta_net" if recurrent else "attention": kept}

        period = model.num_layers if model.unroll and not stored else model.period
        x, kept = in_periods(of_kinds, x, [layers], model=model, period=period)
        return x[:, first_column:], kept, None

    if model.unroll and not stored:
        outputs = []
        for number, layer in enumerate(unstack(layers, model=model)):
            sight = window if model.is_local(number) else everything
            if model.is_unrotated(number):
                sight = sight[0], None
            # Earlier layers compute every column: later columns attend to them.
            first = first_column if number == model.num_layers - 1 else 0
            one = functools.partial(_traced_once, model=model, sight=sight, first=first)
            x, output = rematerialised(one)(x, layer, experts.of_layer(number))
            outputs.append(output)
        return x, *jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    # Local and global layers in one scan: which one a turn is goes in as an array.
    mixed = any(model.local_layers) and not all(model.local_layers)
    local = jnp.asarray(model.local_layers) if mixed else None
    # A window of all columns hides nothing.
    size = mask.columns
    widths = size if model.sliding_window is None else model.sliding_window, size
    unrotated = jnp.asarray(model.unrotated_layers) if model.unrotated_layers else None

    def scanned(x: Array, one: tuple[Params, Any, Any, Any]) -> tuple[Any, Any]:
        layer, local, unrotated, chosen = one
        sight: Sight = window if all(model.local_layers) else everything
        if local is not None:
            rotary = jax.tree.map(
                lambda narrow, wide: jnp.where(local, narrow, wide),
                window[1],
                everything[1],
            )
            # Traced, as the scan has one body; `windows` has the two values, for
            # engines whose windows are static.
            width = jnp.where(local, *widths)
            sight = dataclasses.replace(mask, window=width, windows=widths), rotary
        if unrotated is not None:
            sight = sight[0], unless(unrotated, sight[1])
        own = Given(chosen, experts.tokens)
        return _layer(x, layer, own, model=model, sight=sight)

    # One layer is compiled for all L; what each keeps for the gradient is `remat`'s.
    of_layers = layers, local, unrotated, experts.chosen
    x, (key_values, routing) = jax.lax.scan(rematerialised(scanned), x, of_layers)
    return x[:, first_column:], key_values, routing


def _traced_once(
    x: Array,
    params: Params,
    experts: Given,
    *,
    model: ModelConfig,
    sight: Sight,
    first: int,
) -> tuple[Any, Any]:
    """`_layer`, for layers that run one by one: what is alike is traced once."""
    mask, rotary = sight
    window = mask.window  # a number, which `jit` would trace
    mask = dataclasses.replace(mask, window=None)
    return _jitted_layer(
        x, params, experts, mask, rotary, model=model, window=window, first=first
    )


# Not for its speed, which is that of the program it is a part of: JAX keeps what it
# traced, so that a program with six layers, or with a branch for each size of packed
# rows, does not trace the same lines again. Compilers inline the call.
@functools.partial(jax.jit, static_argnames=("model", "window", "first"))
def _jitted_layer(
    x: Array,
    params: Params,
    experts: Given,
    mask: AttentionMask,
    rotary: Any,
    *,
    model: ModelConfig,
    window: int | None,
    first: int,
) -> tuple[Any, Any]:
    mask = dataclasses.replace(mask, window=window)
    sight = mask, rotary
    return _layer(x, params, experts, model=model, sight=sight, first=first)


def _layer(
    x: Array,
    params: Params,
    experts: Given,
    *,
    model: ModelConfig,
    sight: Sight,
    first: int = 0,
    recurrent: bool = False,
) -> tuple[Any, Any]:
    mask, rotary = sight
    (y, kept), routing = blocks.apply(
        block_of(model, recurrent=recurrent),
        leaves.read(params),
        x,
        experts=experts,
        first=first,
        mask=mask,
        rotary=rotary,
    )
    y = axes.rows_apart(y) if mask.cut is None else mask.cut.apart(y)
    return y, (kept, routing)


def block_of(model: ModelConfig, *, recurrent: bool) -> blocks.Block:
    """The block of a layer, with attention or a DeltaNet."""
    if not recurrent:
        return blocks.Block(model)
    # Loaded by the models that have it.
    from rlhf_jax.models.delta_net import GatedDeltaNet

    return blocks.Block(model, GatedDeltaNet)


def in_periods(
    one: Callable[[Array, Sequence[Any], int], tuple[Array, Any]],
    x: Array,
    stacks: Sequence[Params],
    *,
    model: ModelConfig,
    period: int,
) -> tuple[Array, Any]:
    """x through all layers, a period of them in each turn of one scan.

    Layers of one kind that follow each other in a period are a scan in that turn, so
    that compilers meet each kind once; with `model.unroll` they stay one by one.

    Args:
      one: of x, what each stack has of a layer, and its number in the period: returns
        x, and {module: what is kept}.
      stacks: {module: leaves stacked over the layers that have it} each.
      period: a multiple of `model.period`.

    Returns:
      x, and {module: what is kept, stacked over the layers that have it}.
    """
    turns = model.num_layers // period

    runs = [1] * period if model.unroll else _runs(model, layers=period)

    def turn(x: Array, stacks: Sequence[Params]) -> tuple[Array, Any]:
        kept, first = [], 0
        for size, run in zip(runs, _by_runs(stacks, runs, model=model), strict=True):

            def of_kind(
                x: Array, layer: Sequence[Params], number: int = first
            ) -> tuple[Array, Any]:
                return one(x, layer, number)

            if size == 1:
                x, of_layer = of_kind(x, jax.tree.map(lambda leaf: leaf[0], run))
                of_run = jax.tree.map(lambda leaf: leaf[None], of_layer)
            else:
                x, of_run = jax.lax.scan(of_kind, x, run)
            kept.append(of_run)
            first += size
        return x, joined(kept)

    if turns == 1:
        return turn(x, stacks)
    apart = jax.tree.map(
        lambda leaf: leaf.reshape(turns, -1, *leaf.shape[1:]), list(stacks)
    )
    x, kept = jax.lax.scan(turn, x, apart)
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)


def _runs(model: ModelConfig, *, layers: int) -> list[int]:
    """How many layers of one kind follow each other, of the first so many.

    Two DeltaNets and attention, twice: 2, 1, 2, 1.
    """
    kinds = map(model.kind, range(layers))
    return [len(list(run)) for _, run in itertools.groupby(kinds)]


def _by_runs(
    stacks: Sequence[Params], runs: Sequence[int], *, model: ModelConfig
) -> list[list[Params]]:
    """Of each run what each stack has: {module: leaves [n, ...]} of its n layers."""
    ends = list(itertools.accumulate(runs))
    starts = [end - size for end, size in zip(ends, runs, strict=True)]

    def of(stack: Params) -> list[Params]:
        parts: list[Params] = [{} for _ in runs]
        for module, tree in stack.items():
            has = model.layers_of(module)
            counts = [
                sum(start <= layer < end for layer in has)
                for start, end in zip(starts, ends, strict=True)
            ]
            leaves, structure = jax.tree.flatten(tree)
            # Of a split the gradient is one concatenation.
            split = [jax.lax.split(leaf, counts, axis=0) for leaf in leaves]
            for at, count in enumerate(counts):
                if count:
                    parts[at][module] = structure.unflatten([x[at] for x in split])
        return parts

    return [list(run) for run in zip(*map(of, stacks), strict=True)]


def joined(runs: Sequence[Params]) -> Params:
    """{module: leaves [n, ...]} of runs, each of which has them of its own layers."""
    modules = dict.fromkeys(module for run in runs for module in run)
    return {
        module: jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves),
            *(run[module] for run in runs if module in run),
        )
        for module in modules
    }


def stacked(layers: Sequence[Params]) -> Params:
    """{module: leaves [n, ...]} of layers, n of which have the module."""
    modules = dict.fromkeys(module for layer in layers for module in layer)
    return {
        module: jax.tree.map(
            lambda *leaves: jnp.stack(leaves),
            *(layer[module] for layer in layers if module in layer),
        )
        for module in modules
    }


def unstack(
    tree: Any, *, model: ModelConfig, layers: int | None = None
) -> tuple[Any, ...]:
    """Takes stacked layers (or caches) apart, once, before a decode loop.

    Args:
      layers: how many of the model's, a multiple of its period; None is all.
    """
    count = model.num_layers if layers is None else layers
    if not model.recurrent_layers:
        return _split(tree, count)
    parts = {
        module: dict(zip(numbers, _split(tree[module], len(numbers)), strict=True))
        for module in tree
        if (numbers := [n for n in model.layers_of(module) if n < count])
    }
    return tuple(
        {module: part[number] for module, part in parts.items() if number in part}
        for number in range(count)
    )


def _split(tree: Any, count: int) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    # Of a split the gradient is one concatenation; of L slices it would be a sum of L
    # arrays as large as the whole.
    split = [jax.lax.split(leaf, (1,) * count, axis=0) for leaf in leaves]
    return tuple(
        structure.unflatten([jnp.squeeze(part, 0) for part in parts])
        for parts in zip(*split, strict=True)
    )
