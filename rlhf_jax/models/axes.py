"""Logical axes: what each dimension of each parameter is, whatever it lies on.

`devices/sharding.py` maps them to the axes of a mesh. A parameter is known by the end
of its path, so that the tables hold for a policy, for the trunk of a critic, for
adapters, for what an optimizer keeps of any of them, and for int8 storage.

    layers/attention/query/kernel   [L, D, H·d]   ("layers", "embed", "heads")

Activations have one rule of their own: rows lie on every axis of the mesh that holds
rows, the other dimensions on none. `rows_apart` says so to the compiler where it could
not know: GSPMD must gather weights that are sharded, and not activations. On a mesh
with a `context` axis `context.py` makes the parts of a row rows of their own.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, PartitionSpec

Array = jax.Array
Names = tuple[str | None, ...]

ROW_AXES = ("data", "fsdp")  # of a mesh, that share the rows of a batch
CONTEXT_AXIS = "context"  # of a mesh, that shares the columns of a row
# Where no columns are shared, as in decoding, context is one more axis for rows.
ACTIVATION_AXES = (*ROW_AXES, CONTEXT_AXIS)
VOCABULARY_AXIS = "tensor"  # of a mesh, that shares the tokens of a vocabulary

_LINEAR = {  # of a layer: what goes in, and what comes out
    ("attention", "query"): ("embed", "heads"),
    ("attention", "key"): ("embed", "kv_heads"),
    ("attention", "value"): ("embed", "kv_heads"),
    ("attention", "output"): ("heads", "embed"),
    ("mlp", "up"): ("embed", "mlp"),
    ("mlp", "gate"): ("embed", "mlp"),
    ("mlp", "down"): ("mlp", "embed"),
}
_NORMS = (
    *(("attention", "query_norm"), ("attention", "key_norm")),
    *(("attention_norm",), ("mlp_norm",)),
    *(("attention_post_norm",), ("mlp_post_norm",)),
)
# By the end of the path; layers are stacked, and so begin with "layers".
PARAMETERS: dict[tuple[str, ...], Names] = {
    ("embed", "tokens"): ("vocab", "embed"),
    ("embed", "positions"): ("positions", "embed"),
    **{(*path, "kernel"): ("layers", *names) for path, names in _LINEAR.items()},
    **{
        (*path, "bias"): ("layers", None if out == "embed" else out)
        for path, (_, out) in _LINEAR.items()
    },
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
# What stands in a kernel's place: [L, in, r] and [L, r, out], and the parts of int8.
LORA = {"lora_a": (0, 1, None), "lora_b": (0, None, 2)}
STORED = ("held", "values", "scales")


def of(path: tuple[str, ...]) -> Names | None:
    """The logical axes of a parameter; None for what is no parameter.

    Args:
      path: names from any root, as in ("policy", "layers", "mlp", "up", "kernel").
    """
    while path and path[-1] in STORED:
        path = path[:-1]
    taken = None
    if path and path[-1] in LORA:
        path, taken = (*path[:-1], "kernel"), LORA[path[-1]]
    for length in range(min(LONGEST, len(path)), 1, -1):
        names = PARAMETERS.get(path[-length:])
        if names is not None:
            if taken is None:
                return names
            return tuple(None if at is None else names[at] for at in taken)
    return None


def rows_apart(x: Array) -> Array:
    """The array with its rows on the row axes of the mesh that is set, if one is."""
    sizes = _auto_axes()
    if not sizes:
        return x  # with explicit axes the arrays say it themselves
    spec = PartitionSpec(row_axes(sizes, rows=x.shape[0], among=ACTIVATION_AXES))
    return jax.lax.with_sharding_constraint(x, spec)


def rows_spread(logits: Array) -> Array:
    """Logits with their rows also on the devices that share the vocabulary.

    What a device holds of all rows goes to theirs by one all-to-all, after which a row
    is whole and a draw from it is local:

        device       0    1    2    3            0    1    2    3
        row 0        a    b    c    d           abcd
        row 1        a    b    c    d    -->         abcd
        row 2        a    b    c    d                     abcd
        row 3        a    b    c    d                          abcd

    Rows that all the axes together do not divide stay on the row axes.

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
        # Else the compiler, which looks back from the rows, gathers the head.
        shared = PartitionSpec(of_rows, VOCABULARY_AXIS)
        logits = jax.lax.with_sharding_constraint(logits, shared)
    spec = PartitionSpec(row_axes(sizes, rows=rows, among=spread))
    return jax.lax.with_sharding_constraint(logits, spec)


def beside_kernel(leaf: Array, path: tuple[str, ...]) -> Array:
    """An adapter of one layer, sharded over `tensor` as its kernel is and no further.

    `devices/sharding.py` may store the other side in parts as well, as the rows of
    query's lora_a on a mesh of data and tensor. The compiler then shards activations
    to match, and decodes with ten exchanges per layer instead of two:

        query, key, value, gate, up    (x A) B_s        A whole: no exchange
        output, down                   (x_s A_s) B      one sum, that of x_s W_s too

    Args:
      leaf: [in, r] or [r, out] of an adapter; other parameters are returned unchanged,
        and so are all on a mesh whose `fsdp` or `context` holds that other side.
      path: as in ("attention", "query", "lora_a").
    """
    names, sizes = of(path), _auto_axes()
    shared = {axis for axis, size in sizes.items() if size > 1} - {"data"}
    if path[-1] not in LORA or names is None or shared != {VOCABULARY_AXIS}:
        return leaf
    at = (None if name in (None, "embed") else VOCABULARY_AXIS for name in names[1:])
    return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*at))


def _auto_axes() -> dict[str, int]:
    """Sizes of the Auto axes of the mesh that is set; none if those are one device.

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
    """How many devices of the mesh that is set share so many rows; 1 without one.

    Axes of a `jax.shard_map` around it do not count, as `rows` are of one share there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: mesh.shape[axis] for axis in {*mesh.shape} - {*mesh.manual_axes}}
    axes = row_axes(sizes, rows=rows, among=ACTIVATION_AXES)
    return math.prod(sizes[axis] for axis in axes)


def vocabulary_devices(vocab_size: int) -> int:
    """How many devices of the mesh that is set share the vocabulary; 1 without one."""
    count = dict(jax.sharding.get_abstract_mesh().shape).get(VOCABULARY_AXIS, 1)
    return 1 if vocab_size % count else count


def row_axes(
    sizes: dict[str, int], *, rows: int, among: tuple[str, ...] = ROW_AXES
) -> tuple[str, ...]:
    """The axes that rows lie on: those of `among`, as far as they divide them.

    Args:
      among: `ROW_AXES` for the rows of records.
    """
    present = tuple(axis for axis in among if sizes.get(axis, 1) > 1)
    while present and rows % math.prod(sizes[axis] for axis in present):
        present = present[:-1]
    return present
