"""Logical axes of parameters, and how rows and columns are sharded over a mesh.

`devices/sharding.py` maps logical axes to the axes of a mesh. The end of a parameter's
path identifies it, so that one table serves a policy, the trunk of a critic, adapters,
the optimizer state of each of them, and int8 storage.

    layers/attention/query/kernel   [L, D, H·d]   ("layers", "embed", "heads")

Activations have one rule: rows are sharded over every axis of the mesh that shares
rows, and no other dimension is. `rows_apart` tells the compiler so where it cannot
know: GSPMD must gather sharded weights, and not activations.

On a mesh with a `context` axis several devices share the columns of a row:

    chunks of a row     0  1  2  3  4  5  6  7          context=4
    in order            0  0  1  1  2  2  3  3          device of the chunk
    balanced            0  1  2  3  3  2  1  0

Records stay [B, S]. While a decoder runs on whole rows, the columns of each device form
rows of their own, [B·c, S/c], sharded over the row axes and `context`. Computation per
token (projections, norms, MLP, log-probs) then needs no communication and is
partitioned like a larger batch. Only attention gathers keys and values of the whole row
(`attention/per_device.py`), or passes them round (`ring_passes.py`).

Within the decoder columns are `balanced`, so that every device has equally many keys
before its queries; elsewhere they are in order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from rlhf_jax.models.config import ATTENTIONS, MLPS

Array = jax.Array
Names = tuple[str | None, ...]

# Axes of a mesh.
EXPERT_AXIS = "expert"  # shares the experts of a mixture
ROW_AXES = ("dcn", "data", "fsdp", EXPERT_AXIS)  # share the rows of a batch
COPIES = {"dcn", "data"}  # row axes along which parameters are replicated
CONTEXT_AXIS = "context"  # shares the columns of a row
# Where no columns are shared, as in decoding, context is one more axis for rows.
ACTIVATION_AXES = (*ROW_AXES, CONTEXT_AXIS)
TENSOR_AXIS = "tensor"  # shares heads and widths
VOCABULARY_AXIS = TENSOR_AXIS  # shares the tokens of a vocabulary


def _linear(
    modules: tuple[str, ...],
    names: Mapping[str, tuple[str | None, str | None]],
    stacked: Names = ("layers",),
) -> dict[tuple[str, ...], Names]:
    """Kernels and biases of modules, from {name: (input axis, output axis)}."""
    leaves: dict[tuple[str, ...], Names] = {}
    for module in modules:
        for name, (into, out) in names.items():
            leaves[module, name, "kernel"] = *stacked, into, out
            leaves[module, name, "bias"] = *stacked, None if out == "embed" else out
    return leaves


_MLP = {"up": ("embed", "mlp"), "gate": ("embed", "mlp"), "down": ("mlp", "embed")}
_NORMS = (
    *((module, f"{name}_norm") for module in ATTENTIONS for name in ("query", "key")),
    *(("attention_norm",), ("attention_post_norm",)),
    *(("mlp_norm",), ("mlp_post_norm",), ("per_layer_norm",)),
    *(("dense_post_norm",), ("experts_norm",), ("experts_post_norm",)),
)
# By the end of the path. Layers are stacked: their first axis is "layers".
PARAMETERS: dict[tuple[str, ...], Names] = {
    ("embed", "tokens"): ("vocab", "embed"),
    ("embed", "positions"): ("positions", "embed"),
    ("embed", "per_layer"): ("vocab", "embed"),
    ("per_layer_mix", "kernel"): ("embed", None),
    ("per_layer_mix", "scale"): (None,),
    **_linear(
        ATTENTIONS,
        {
            "query": ("embed", "heads"),
            "key": ("embed", "kv_heads"),
            "value": ("embed", "kv_heads"),
            "gate": ("embed", "heads"),
            "output": ("heads", "embed"),
        },
    ),
    ("attention", "sinks"): ("layers", "heads"),
    **_linear(MLPS, _MLP),
    **_linear(("experts",), _MLP, stacked=("layers", "experts")),
    ("experts", "router", "weight"): ("layers", "embed", None),
    ("experts", "router", "bias"): ("layers", None),
    ("experts", "router", "scale"): ("layers", None),
    ("experts", "scale"): ("layers", None),
    **_linear(
        ("delta_net",),
        {
            **dict.fromkeys(
                ("query", "key", "value", "gate", "beta", "decay"), ("embed", "heads")
            ),
            "output": ("heads", "embed"),
        },
    ),
    ("delta_net", "query_taps"): ("layers", None, "heads"),
    ("delta_net", "key_taps"): ("layers", None, "heads"),
    ("delta_net", "value_taps"): ("layers", None, "heads"),
    ("delta_net", "log_rate"): ("layers", "heads"),
    ("delta_net", "decay_bias"): ("layers", "heads"),
    ("delta_net", "norm_scale"): ("layers", None),
    **_linear(("per_layer",), {"gate": ("embed", None), "output": (None, "embed")}),
    ("layers", "layer_scale"): ("layers", None),
    **{
        (*path, leaf): ("layers", None) for path in _NORMS for leaf in ("scale", "bias")
    },
    ("final_norm", "scale"): (None,),
    ("final_norm", "bias"): (None,),
    ("head", "kernel"): ("vocab", "embed"),
    ("score", "kernel"): (None,),
    ("score", "bias"): (),
}
LONGEST = max(map(len, PARAMETERS))
LORA = ("lora_a", "lora_b")  # beside a kernel, [L, in, r] and [L, r, out]
STORED = ("held", "values", "scales")  # parts of a leaf in int8 or on the host


def of(path: tuple[str, ...]) -> Names | None:
    """The logical axes of a parameter; None for any other leaf.

    Args:
      path: names from any root, such as ("policy", "layers", "mlp", "up", "kernel").
    """
    while path and path[-1] in STORED:
        path = path[:-1]
    taken = None
    if path and path[-1] in LORA:
        path, taken = (*path[:-1], "kernel"), path[-1]
    for length in range(min(LONGEST, len(path)), 1, -1):
        names = PARAMETERS.get(path[-length:])
        if names is not None:
            if taken is None:
                return names
            *before, size_in, size_out = names
            return (
                (*before, size_in, None)
                if taken == "lora_a"
                else (*before, None, size_out)
            )
    return None


def rows_apart(x: Array) -> Array:
    """Shards the rows of an array over the row axes of the mesh that is set, if any."""
    sizes = _auto_axes()
    if not sizes:
        return x  # explicit axes are part of an array's type
    spec = PartitionSpec(row_axes(sizes, rows=x.shape[0], among=ACTIVATION_AXES))
    return jax.lax.with_sharding_constraint(x, spec)


def rows_spread(logits: Array) -> Array:
    """Shards the rows of logits also over the devices that share the vocabulary.

    One all-to-all moves every row to one device, so that a draw from it is local:

        device       0    1    2    3            0    1    2    3
        row 0        a    b    c    d           abcd
        row 1        a    b    c    d    -->         abcd
        row 2        a    b    c    d                     abcd
        row 3        a    b    c    d                          abcd

    Rows that all the axes together do not divide stay on the row axes. A barrier keeps
    the caller's slice of the columns apart: libtpu 0.0.42 fails (RET_CHECK) on a sum
    over devices of which one slice takes both rows and columns.

    Args:
      logits: [B, V'].
    """
    sizes = _auto_axes()
    spread = (*ACTIVATION_AXES, VOCABULARY_AXIS)
    if not sizes:
        return logits
    rows, columns = logits.shape
    of_rows = row_axes(sizes, rows=rows, among=ACTIVATION_AXES)
    if vocabulary_devices(columns) > 1:
        # Otherwise the compiler propagates the sharding of rows and gathers the head.
        shared = PartitionSpec(of_rows, VOCABULARY_AXIS)
        logits = jax.lax.with_sharding_constraint(logits, shared)
    spec = PartitionSpec(row_axes(sizes, rows=rows, among=spread))
    logits = jax.lax.with_sharding_constraint(logits, spec)
    return jax.lax.optimization_barrier(logits)


def beside_kernel(leaf: Array, path: tuple[str, ...]) -> Array:
    """Shards a small matrix of one layer over `tensor` as the kernel beside it is.

    `devices/sharding.py` may shard its other side as well, such as the rows of query's
    lora_a, or of a router, on a mesh of data and tensor. The compiler would then shard
    activations to match, and decode with ten exchanges per layer instead of two (three
    for a mixture):

        query, key, value, gate, up    (x A) B_s        A whole: no exchange
        output, down                   (x_s A_s) B      one sum, shared with x_s W_s
        router                         x W              W whole: no exchange
        embeddings of each layer       x W              W whole: no exchange

    Args:
      leaf: [in, r] or [r, out] of an adapter, [D, E] of a router, or a matrix of
        `per_layer.py`. Other parameters are returned unchanged, and so are all of them
        on a mesh where another axis shards parameters.
      path: such as ("attention", "query", "lora_a").
    """
    names, sizes = of(path), _auto_axes()
    shared = {axis for axis, size in sizes.items() if size > 1} - COPIES
    few = path[-1] in LORA or path[-2:] == ("router", "weight")
    few |= path[0] in ("per_layer", "per_layer_mix")
    if not few or names is None or shared != {VOCABULARY_AXIS}:
        return leaf
    names = names[-leaf.ndim :]  # without "layers"
    at = (None if name in (None, "embed") else VOCABULARY_AXIS for name in names)
    return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*at))


def shares_heads(num_heads: int, num_kv_heads: int, *, devices: int) -> bool:
    """Whether devices can share attention heads.

    Fewer key heads than devices are repeated: each device has the one that its query
    heads read.
    """
    fewer, more = sorted((num_kv_heads, devices))
    return num_heads % devices == 0 and more % fewer == 0


def of_own_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """function(x) of [N, n], each device on its own rows.

    For what XLA:GPU cannot partition, as top-k: it would gather the rows of all.
    """
    sizes = own_axes()
    if math.prod(sizes.values()) == 1:
        return function(x)
    rows = tuple(axis for axis in ACTIVATION_AXES if axis in sizes)
    room = -x.shape[0] % math.prod(sizes[axis] for axis in rows)
    split = jax.shard_map(
        function,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=PartitionSpec(rows),
        out_specs=PartitionSpec(rows),
        axis_names=set(sizes),
        check_vma=False,
    )
    return split(jnp.pad(x, ((0, room), (0, 0))))[: x.shape[0]]


def own_axes() -> dict[str, int]:
    """Sizes of the axes of the mesh that is set, without those of a `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes
    }


def _auto_axes() -> dict[str, int]:
    """Sizes of the Auto axes of the mesh that is set; {} if they span one device.

    Within a `jax.shard_map` over some axes the others are still Auto.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {
        axis: mesh.shape[axis]
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    return sizes if math.prod(sizes.values()) > 1 else {}


def row_devices(rows: int) -> int:
    """How many devices of the mesh that is set share `rows` rows; 1 without a mesh.

    Axes of an enclosing `jax.shard_map` do not count: there, `rows` are one share.
    """
    sizes = own_axes()
    axes = row_axes(sizes, rows=rows, among=ACTIVATION_AXES)
    return math.prod(sizes[axis] for axis in axes)


def vocabulary_devices(vocab_size: int) -> int:
    """How many devices of the mesh that is set share the vocabulary; 1 without any."""
    count = dict(jax.sharding.get_abstract_mesh().shape).get(VOCABULARY_AXIS, 1)
    return 1 if vocab_size % count else count


def row_axes(
    sizes: dict[str, int], *, rows: int, among: tuple[str, ...] = ROW_AXES
) -> tuple[str, ...]:
    """The longest prefix of the axes in `among` whose sizes together divide `rows`.

    Args:
      sizes: {axis: devices}; axes that are missing or of one device are left out.
      among: `ROW_AXES` for the rows of records.
    """
    present = tuple(axis for axis in among if sizes.get(axis, 1) > 1)
    while present and rows % math.prod(sizes[axis] for axis in present):
        present = present[:-1]
    return present


Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the columns of rows are shared by the devices of a mesh with `context`."""

    rows: tuple[str, ...]  # axes that share the rows
    count: int  # c, devices that share the columns of a row

    def width(self, columns: int) -> int:
        """S' ≥ S, the smallest multiple of 2c."""
        return -(-columns // (2 * self.count)) * 2 * self.count

    @property
    def by_row(self) -> PartitionSpec:
        """Sharding of [B, ...] whose columns are whole."""
        return PartitionSpec(self.rows or None)

    @property
    def by_column(self) -> PartitionSpec:
        """Sharding of [B, S', ...] whose columns are shared over `context`."""
        return PartitionSpec(self.rows or None, CONTEXT_AXIS)

    @property
    def by_part(self) -> PartitionSpec:
        """Sharding of [B·c, ...], the parts of rows."""
        return PartitionSpec((*self.rows, CONTEXT_AXIS))

    def apart(self, x: Array) -> Array:
        """Puts every part of [B·c, ...] on its device."""
        return jax.lax.with_sharding_constraint(x, self.by_part)

    def parts(self, x: Array) -> Array:
        """[B, S', ...] -> [B·c, S'/c, ...], columns in order; nothing moves."""
        return self._mapped(lambda x: x, x, self.by_column, self.by_part)

    def whole(self, x: Array) -> Array:
        """The inverse of `parts`."""
        return self._mapped(lambda x: x, x, self.by_part, self.by_column)

    def balanced_parts(self, x: Array) -> Array:
        """[B, S', ...] -> [B·c, S'/c, ...], balanced; every device holds all of x."""
        return self.parts(x[:, balanced(x.shape[1], count=self.count)])

    def whole_of_balanced(self, x: Array) -> Array:
        """The inverse of `balanced_parts`: each device sends two chunks."""
        count = self.count

        def in_order(x: Array) -> Array:
            first, second = jnp.split(x, 2, axis=1)
            # Chunks i and 2c - 1 - i: one of them is even, and one is odd.
            first_is_even = jax.lax.axis_index(CONTEXT_AXIS) % 2 == 0
            # `ppermute` takes one sender per receiver: the halves are two permutations.
            even = jnp.where(first_is_even, first, second)
            odd = jnp.where(first_is_even, second, first)
            ways = [
                [(min(chunk, 2 * count - 1 - chunk), chunk // 2) for chunk in chunks]
                for chunks in (range(0, 2 * count, 2), range(1, 2 * count, 2))
            ]
            moved = [
                jax.lax.ppermute(half, CONTEXT_AXIS, way)
                for half, way in zip((even, odd), ways, strict=True)
            ]
            return jnp.concatenate(moved, axis=1)

        return self._mapped(in_order, x, self.by_part, self.by_column)

    def _mapped(
        self,
        function: Callable[[Array], Array],
        x: Array,
        at: PartitionSpec,
        to: PartitionSpec,
    ) -> Array:
        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            function, mesh=mesh, in_specs=at, out_specs=to, check_vma=False
        )(x)


def cut_of(rows: int) -> Cut | None:
    """The cut of `rows` rows on the mesh that is set; None without a context axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or mesh.axis_types[0] != AxisType.Auto:
        return None
    sizes = dict(mesh.shape)
    count = sizes.get(CONTEXT_AXIS, 1)
    if count == 1:
        return None
    return Cut(row_axes(sizes, rows=rows), count)


def per_token(function: Callable[..., Tree], *arrays: Array) -> Tree:
    """Computes function(*arrays) token by token; each device computes its columns.

    Args:
      function: [N, T, ...] arrays to [N, T] arrays; no token may depend on another. On
        a mesh with a context axis N is B·c and T is S/c.

    Returns:
      Arrays [B, S].
    """
    rows, columns = arrays[0].shape[:2]
    cut = cut_of(rows)
    if cut is None:
        return function(*arrays)
    room = cut.width(columns) - columns
    results = function(*(cut.parts(padded(x, room)) for x in arrays))

    def back(x: Array) -> Array:
        return cut.whole(x)[:, :columns]

    return jax.tree.map(back, results)


def per_prediction(
    function: Callable[..., Tree],
    *hidden: Array,
    tokens: Array,
    first_column: int,
) -> Tree:
    """function(*hidden, tokens, first_column=); each device computes its columns.

        column t            0    1    2    3
        is about            a    b    c    d     tokens[:, t], given hidden[:, t - 1]
        a device has             h1   h2         hidden states of its columns
        and computes             c    d          the predictions from them

    Args:
      function: hidden states [N, T, D] each and tokens i32[N, T] to [N, T] arrays.
        Column t is about tokens[:, t] and depends on hidden[:, t - 1] alone; columns
        before `first_column`, at least 1, are 0.

    Returns:
      Arrays [B, S], 0 before `first_column`.
    """
    if cut_of(tokens.shape[0]) is None:
        return function(*hidden, tokens, first_column=first_column)

    def of_part(*arrays: Array) -> Tree:
        *hidden, following = arrays
        about = jnp.pad(following, ((0, 0), (1, 0)))  # column 0 is about nothing
        results = function(*(padded(x, 1) for x in hidden), about, first_column=1)
        return jax.tree.map(lambda x: x[:, 1:], results)

    results = per_token(of_part, *hidden, padded(tokens[:, 1:], 1))
    predicted = jnp.arange(tokens.shape[1], dtype=jnp.int32) >= first_column

    def shifted(x: Array) -> Array:
        x = jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(predicted[None], x, jnp.zeros_like(x))

    return jax.tree.map(shifted, results)


def padded(x: Any, room: int) -> Any:
    """Appends `room` columns of zeros to [B, S, ...]."""
    return jnp.pad(x, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)))


def balanced(columns: int, *, count: int) -> np.ndarray:
    """i32[S], the balanced columns of device 0, then of device 1, and so on.

    >>> print(balanced(8, count=2))
    [0 1 6 7 2 3 4 5]
    """
    chunks = np.arange(columns, dtype=np.int32).reshape(2 * count, -1)
    pairs = [(i, 2 * count - 1 - i) for i in range(count)]
    return chunks[np.array(pairs).reshape(-1)].reshape(-1)


def in_order(x: Array, *, count: int) -> Array:
    """Puts balanced columns of [B, h, S, d] in order, by static slices."""
    rows, heads, columns, size = x.shape
    pairs = x.reshape(rows, heads, count, 2, -1, size)
    first, second = pairs[:, :, :, 0], pairs[:, :, ::-1, 1]
    return jnp.concatenate([first, second], axis=2).reshape(rows, heads, columns, size)
