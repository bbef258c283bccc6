"""How parameters and optimizer states are sharded over a mesh.

    mesh = MeshShape(data=2, fsdp=4).make()
    state = sharding.create(make_state, mesh=mesh)         never whole on one device
    batch = row_sharding.put_rows(batch, mesh=mesh)        rows over the row axes
    update = jax.jit(partial(sharding.on(mesh, sft.update), ...), ...)
    state, stats = update(state, batch=batch, ...)

`jax.jit` and GSPMD do the rest: this module has no collectives. Under
`with jax.set_mesh(mesh):` `mesh=` and `on` may be left out, but every program there
then rejects arrays on other devices, such as a reference on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_jax.devices import moving
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes

Array = jax.Array
Tree = TypeVar("Tree")
Args = ParamSpec("Args")
Rules = Mapping[str, str | tuple[str, ...] | None]

# Logical axes (`models/axes.py`) to axes of the mesh; None is replicated.
RULES: Rules = {
    "layers": None,
    "vocab": "tensor",
    "positions": "tensor",
    "embed": ("fsdp", "expert", "context"),  # without what "experts" takes
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": ("expert",),
}
SMALL = 2**20  # most elements of a leaf that may be replicated


def on(mesh: Mesh | None, function: Callable[Args, Tree]) -> Callable[Args, Tree]:
    """The function for arrays on a mesh, to be jitted.

    During tracing the decoder knows the mesh, and shards the rows of activations
    (`axes.rows_apart`); nothing else changes.
    """
    if mesh is None:
        return function

    @functools.wraps(function)
    def traced(*args: Args.args, **kwargs: Args.kwargs) -> Tree:
        # The abstract mesh has axes but no devices: it tells tracing what is sharded,
        # and places nothing.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    # Profiles and the cache of programs show the name, which a partial lacks.
    traced.__name__ = getattr(function, "func", function).__name__
    return traced


def shardings(
    tree: Tree, *, mesh: Mesh | None = None, rules: Rules = RULES, small: int = SMALL
) -> Tree:
    """The sharding of every leaf of a model, an optimizer or a training state.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s, with parameters at any depth.
      mesh: None is the mesh that is set (`jax.set_mesh`).
      rules: logical axis -> axis of the mesh, or axes that share it. Axes that an
        earlier dimension takes are left out.
      small: elements; a leaf that no rule shards is replicated up to this size. A
        larger parameter is sharded over the axes of "embed" or "heads".

    Returns:
      A tree of `NamedSharding`s.

    Raises:
      InputError: two dimensions of a parameter map to one axis, an axis does not divide
        a dimension, or a leaf above `small` other than the scales of an int8 kernel
        would be replicated; names the leaf.
    """
    mesh = mesh_or_set(mesh)

    def of(path: Any, leaf: Any) -> NamedSharding:
        spec = _spec(_names(path), leaf.shape, mesh=mesh, rules=rules, small=small)
        is_placed = isinstance(leaf, Array) and not isinstance(leaf, core.Tracer)
        kind = leaf.sharding.memory_kind if is_placed else None
        return NamedSharding(mesh, spec, memory_kind=kind)

    return jax.tree_util.tree_map_with_path(of, tree)


def mesh_or_set(mesh: Mesh | None) -> Mesh:
    """`mesh`, or the mesh that is set; InputError without a mesh of Auto axes."""
    if mesh is None:
        mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise InputError(
            "mesh: expected one as an argument or set, got none; put the call into "
            "`with jax.set_mesh(mesh):`"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise InputError(
            f"mesh: expected axes of AxisType.Auto, got {mesh.axis_types}; make it by "
            f"MeshShape, or give axis_types to jax.make_mesh"
        )
    return mesh


def _spec(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    mesh: Mesh,
    rules: Rules,
    small: int,
) -> PartitionSpec:
    where, sizes = "/".join(path), dict(mesh.shape)
    names = axes.of(path)
    if names is not None and len(names) != len(shape):
        names = None  # another rank: neither a parameter nor its optimizer state
    placed: list[str | tuple[str, ...] | None] = []
    taken: list[str] = []  # mesh axes in the spec, each of which may occur once
    scales = False  # whether these are scales, of size 1 along a sharded axis
    for name, size in zip(names or (None,) * len(shape), shape, strict=True):
        mesh_axes = ()
        if name is not None:
            mesh_axes = _axes(name, rules=rules, sizes=sizes, taken=taken)
        # An axis of one device shards nothing.
        mesh_axes = tuple(axis for axis in mesh_axes if sizes[axis] > 1)
        if not mesh_axes or size == 1:
            scales |= bool(mesh_axes)
            placed.append(None)
            continue
        for axis in mesh_axes:
            if axis in taken:
                raise InputError(
                    f"{where}: expected one dimension on mesh axis {axis!r}, got two, "
                    f"{names}; map them to different axes"
                )
        devices = math.prod(sizes[axis] for axis in mesh_axes)
        if size % devices:
            several = "axes" if len(mesh_axes) > 1 else "axis"
            raise InputError(
                f"{where}: expected mesh {several} "
                f"{' and '.join(map(repr, mesh_axes))} to divide its {name!r} "
                f"dimension, got {devices} devices and {size} of {shape}; make the "
                f"{several} smaller, or map {name!r} to another"
            )
        taken += mesh_axes
        placed.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
    # With only `data`, replicated parameters are what was requested.
    sharded = any(size > 1 for axis, size in sizes.items() if axis not in axes.COPIES)
    if sharded and not any(placed) and not scales and math.prod(shape) > small:
        elsewhere = _elsewhere(names, shape, rules=rules, sizes=sizes)
        if elsewhere is not None:
            return elsewhere
        raise InputError(
            f"{where}: expected at most {small} numbers on every device, got "
            f"{shape} that no rule shards on {sizes}; add fsdp or tensor to the mesh, "
            f"or give it logical axes in models/axes.py"
        )
    while placed and placed[-1] is None:  # the form of shardings that `jit` returns
        placed.pop()
    return PartitionSpec(*placed)


def _elsewhere(
    names: Sequence[str | None] | None,
    shape: tuple[int, ...],
    *,
    rules: Rules,
    sizes: dict[str, int],
) -> PartitionSpec | None:
    """The sharding of a large parameter, such as an adapter, whose axes the mesh lacks.

    lora_b is [layers, rank, heads], and with only fsdp `heads` has no axis; nor has
    `embed` of lora_a with only tensor. Replicated adapters and moments would take
    gigabytes. A decode loop reads a copy of adapters that `axes.beside_kernel` shards.
    """
    for rule in (rule for rule in ("embed", "heads") if rule in rules):
        spread = [
            axis for axis in _axes(rule, rules=rules, sizes=sizes) if sizes[axis] > 1
        ]
        devices = math.prod(sizes[axis] for axis in spread)
        for place, (name, size) in enumerate(zip(names or (), shape, strict=False)):
            if spread and name not in (None, "layers") and size % devices == 0:
                axes_of_one = spread[0] if len(spread) == 1 else tuple(spread)
                return PartitionSpec(*(None,) * place, axes_of_one)
    return None


def _axes(
    name: str, *, rules: Rules, sizes: dict[str, int], taken: Sequence[str] = ()
) -> tuple[str, ...]:
    rule = rules.get(name, "no rule")
    if isinstance(rule, tuple):  # those that the mesh has and no other dimension took
        return tuple(axis for axis in rule if axis in sizes and axis not in taken)
    if rule is not None and rule not in sizes:
        got = repr(rule) if name in rules else "no rule"
        raise InputError(
            f"rules: expected an axis of the mesh, {', '.join(sizes)}, for {name!r}, "
            f"got {got}; name one of them, or None for every device"
        )
    return () if rule is None else (rule,)


def _names(path: Any) -> tuple[str, ...]:
    keys = (
        getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
        for key in path
    )
    return tuple(map(str, keys))


def create(
    make: Callable[[], Tree],
    *,
    mesh: Mesh | None = None,
    rules: Rules = RULES,
    small: int = SMALL,
) -> Tree:
    """Creates the result of `make` on the mesh, never whole on one device.

    Args:
      make: returns parameters or a state; traced.
      mesh, rules, small: as in `shardings`, whose errors it may raise.
    """
    where = shardings(jax.eval_shape(make), mesh=mesh, rules=rules, small=small)
    # Each device makes its own part: a whole 70B state would fit on none.
    return jax.jit(on(mesh, make), out_shardings=where)()


def place(
    tree: Tree, *, mesh: Mesh | None = None, rules: Rules = RULES, small: int = SMALL
) -> Tree:
    """Moves existing parameters or a state to a mesh.

    Leaves that are on the mesh already are shared: do not read the source after
    donating the result. Leaves that every process has must be equal in all of them.

    Arguments and errors are those of `shardings`.
    """
    where = shardings(tree, mesh=mesh, rules=rules, small=small)
    return jax.tree.map(_put, tree, where)


def _put(leaf: Array, where: NamedSharding) -> Array:
    if isinstance(leaf, core.Tracer):
        return leaf  # only shapes are needed, as in `jax.eval_shape`
    if isinstance(leaf, Array) and isinstance(leaf.sharding, NamedSharding):
        return moving.move(leaf, where)
    if where.is_fully_addressable:
        return jax.device_put(leaf, where)
    # Typed keys have no NumPy form: moves their words, and wraps them again.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    return jax.make_array_from_callback(
        array.shape, where, lambda index: array[index], dtype=array.dtype
    )
