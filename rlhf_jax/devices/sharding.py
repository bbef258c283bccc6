"""Meshes, and where on them parameters, optimizer states and batches lie.

    mesh = MeshShape(data=2, fsdp=4).make()                --mesh data=2,fsdp=4
    state = sharding.create(make_state, mesh=mesh)         never whole on one device
    batch = row_sharding.put_rows(batch, mesh=mesh)        each process its own rows
    update = jax.jit(partial(sharding.on(mesh, sft.update), ...), ...)
    state, stats = update(state, batch=batch, ...)

| axis | what lies on it |
|---|---|
| data | rows of a batch; parameters are copied along it |
| fsdp | rows of a batch, and a dimension of every large parameter, gathered when read |
| tensor | heads, MLP width and vocabulary: each device computes its part |

`jax.jit` and GSPMD do the rest: there is no collective in this package. Under
`with jax.set_mesh(mesh):` the `mesh=` and `on` may be left out; but then every program
there refuses arrays of other devices, as a reference on the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tyro.constructors import PrimitiveConstructorSpec

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes

Array = jax.Array
Tree = TypeVar("Tree")
Args = ParamSpec("Args")
Rules = Mapping[str, str | None]

AXES = ("data", "fsdp", "tensor")
# Logical axes (`models/axes.py`) to axes of the mesh; None is on every device.
RULES: Rules = {
    "layers": None,
    "vocab": "tensor",
    "positions": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}
SMALL = 2**20  # elements of a leaf that may be on every device


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices share what; on a command line "fsdp=4,tensor=2"."""

    data: int = 1
    """Devices that share the rows of a batch."""
    fsdp: int = 1
    """Devices that share the rows, and the parameters too."""
    tensor: int = 1
    """Devices that share heads, MLP width and vocabulary."""

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise InputError(
                    f"mesh {name}: expected at least 1 device, got {size}; leave it out"
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The mesh of "data=2,fsdp=4"; an axis that is left out is 1.

        Raises:
          InputError: of another form, or an axis that there is not.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name not in AXES or name in sizes or not size.isdecimal():
                raise InputError(
                    f"mesh: expected sizes of {', '.join(AXES)}, as data=2,fsdp=4, got "
                    f"{text!r}; name each axis once"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in dataclasses.asdict(self).items())

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(dataclasses.astuple(self))

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh, over all devices unless others are given; of one, over the first.

        Neighbours on an axis are neighbours in a TPU's torus where that can be.

        Raises:
          InputError: the axes do not multiply to the number of devices.
        """
        if devices is None:
            devices = jax.devices()
        if self.size == 1 and jax.process_count() == 1:
            devices = devices[:1]
        if len(devices) != self.size:
            raise InputError(
                f"mesh: expected axes that multiply to the {len(devices)} devices, got "
                f"data={self.data} · fsdp={self.fsdp} · tensor={self.tensor} = "
                f"{self.size}; change an axis, or give other devices"
            )
        shape = dataclasses.astuple(self)
        try:
            laid = mesh_utils.create_device_mesh(
                shape, devices=devices, allow_split_physical_axes=True
            )
        except (NotImplementedError, AssertionError, ValueError):
            # Part of a torus, or one that these axes do not follow: any order is right,
            # and the order in which JAX lists the devices costs longer ways at most.
            laid = np.reshape(np.array(devices), shape)
        return Mesh(laid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


ONE_DEVICE = MeshShape()
MeshOption = Annotated[
    MeshShape,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="AXIS=SIZE,...",
        instance_from_str=lambda given: MeshShape.parse(given[0]),
        is_instance=lambda value: isinstance(value, MeshShape),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""A MeshShape as one option of a command line."""


def on(mesh: Mesh | None, function: Callable[Args, Tree]) -> Callable[Args, Tree]:
    """The same function for arrays that lie on a mesh, to be jitted.

    While it is traced the decoder knows the mesh, and keeps the rows of activations
    apart (`axes.rows_apart`); nothing else hears of it.

    Args:
      mesh: None is one device, or the mesh that is set.
    """
    if mesh is None:
        return function

    @functools.wraps(function)
    def traced(*args: Args.args, **kwargs: Args.kwargs) -> Tree:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced


def shardings(
    tree: Tree, *, mesh: Mesh | None = None, rules: Rules = RULES, small: int = SMALL
) -> Tree:
    """Where every leaf of a model, an optimizer or a training state is to lie.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s, with parameters at any depth.
      mesh: None is the one that is set (`jax.set_mesh`).
      rules: logical axis -> axis of the mesh.
      small: elements; a leaf that no rule shards may be copied to every device up to
        this size.

    Returns:
      A tree of `NamedSharding`s.

    Raises:
      InputError: two dimensions of a parameter would lie on one axis, an axis does not
        divide a dimension, or a leaf above `small` would be copied; names the leaf.
    """
    mesh = mesh_or_set(mesh)

    def of(path: Any, leaf: Any) -> NamedSharding:
        spec = _spec(_names(path), leaf.shape, mesh=mesh, rules=rules, small=small)
        kind = leaf.sharding.memory_kind if isinstance(leaf, Array) else None
        return NamedSharding(mesh, spec, memory_kind=kind)

    return jax.tree_util.tree_map_with_path(of, tree)


def mesh_or_set(given: Mesh | None) -> Mesh:
    """The mesh that is given, or else set; InputError without one of Auto axes."""
    mesh = jax.sharding.get_mesh() if given is None else given
    if mesh.empty:
        raise InputError(
            "mesh: expected one that is given or set, got none; put the call into "
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
        names = None  # of another rank: no parameter, nor what is kept of one
    placed: list[str | None] = []
    for name, size in zip(names or (None,) * len(shape), shape, strict=True):
        axis = None if name is None else _axis(name, rules=rules, sizes=sizes)
        if axis is None or sizes[axis] == 1 or size == 1:  # a scale that is shared
            placed.append(None)
            continue
        if axis in placed:
            raise InputError(
                f"{where}: expected one dimension on mesh axis {axis!r}, got two, "
                f"{names}; map them to different axes"
            )
        if size % sizes[axis]:
            raise InputError(
                f"{where}: expected mesh axis {axis!r} to divide its {name!r} "
                f"dimension, got {sizes[axis]} devices and {size} of {shape}; make the "
                f"axis smaller, or map {name!r} to another"
            )
        placed.append(axis)
    sharded = any(size > 1 for axis, size in sizes.items() if axis != "data")
    if sharded and not any(placed) and math.prod(shape) > small:
        raise InputError(
            f"{where}: expected at most {small} numbers on every device, got "
            f"{shape} that no rule shards; give it logical axes in models/axes.py, or "
            f"raise the limit"
        )
    while placed and placed[-1] is None:  # as `jit` says it of what it returns
        placed.pop()
    return PartitionSpec(*placed)


def _axis(name: str, *, rules: Rules, sizes: dict[str, int]) -> str | None:
    if name not in rules:
        raise InputError(
            f"rules: expected one for {name!r}, got {', '.join(rules)}; add it, None "
            f"for every device"
        )
    axis = rules[name]
    if axis is not None and axis not in sizes:
        raise InputError(
            f"rules: expected an axis of the mesh, {', '.join(sizes)}, for {name!r}, "
            f"got {axis!r}; name one of them, or None"
        )
    return axis


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
    """What `make` returns, made where it is to lie: never whole on one device.

    Args, Raises: as `shardings`.
    """
    where = shardings(jax.eval_shape(make), mesh=mesh, rules=rules, small=small)
    return jax.jit(on(mesh, make), out_shardings=where)()


def place(
    tree: Tree, *, mesh: Mesh | None = None, rules: Rules = RULES, small: int = SMALL
) -> Tree:
    """Existing parameters or a state, moved to where they are to lie.

    What lies there already is shared: do not read the source after donating this. What
    every process holds by itself must be the same in all of them.

    Args, Raises: as `shardings`.
    """
    where = shardings(tree, mesh=mesh, rules=rules, small=small)
    return jax.tree.map(_put, tree, where)


def _put(leaf: Array, where: NamedSharding) -> Array:
    if where.is_fully_addressable or not leaf.is_fully_addressable:
        return jax.device_put(leaf, where)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    held = np.asarray(leaf)
    return jax.make_array_from_callback(held.shape, where, lambda index: held[index])
