"""How many devices share what: the axes of a mesh, as an option and as a `Mesh`.

    mesh = MeshShape(data=2, fsdp=4).make()                "data=2,fsdp=4"

| axis | what is sharded over it |
|---|---|
| dcn | rows, over slices that a datacenter's network joins; parameters as over data |
| data | rows of a batch; parameters are replicated along it |
| fsdp | rows of a batch, and a dimension of every large parameter, gathered when read |
| context | columns of a row, while models run on whole rows; parameters as by fsdp |
| expert | rows of a batch, and the experts of a mixture; the rest is replicated |
| tensor | heads, MLP width and vocabulary: each device computes its part |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from tyro.constructors import PrimitiveConstructorSpec

from rlhf_jax.functional.checks import InputError

AXES = ("dcn", "data", "fsdp", "expert", "context", "tensor")
MOST_DIGITS = 9  # of a size


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices share what; on a command line "fsdp=4,tensor=2"."""

    data: int = 1
    """Devices that share the rows of a batch."""
    fsdp: int = 1
    """Devices that share the rows, and the parameters too."""
    tensor: int = 1
    """Devices that share heads, MLP width and vocabulary."""
    context: int = 1
    """Devices that share the columns of a row, and the parameters too."""
    expert: int = 1
    """Devices that share the rows, and the experts of a mixture."""
    dcn: int = 1
    """Slices of TPUs that share the rows: gradients are summed within each first."""

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
            whole = size.isdecimal() and len(size) <= MOST_DIGITS
            if name not in AXES or name in sizes or not whole:
                raise InputError(
                    f"mesh: expected sizes of {', '.join(AXES)}, as data=2,fsdp=4, got "
                    f"{text!r:.80}; name each axis once"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self)
        for axis in ("context", "expert", "dcn"):
            if sizes[axis] == 1:
                del sizes[axis]
        return ",".join(f"{axis}={size}" for axis, size in sizes.items())

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(dataclasses.astuple(self))

    @property
    def rows(self) -> int:
        """Devices that share the rows of a batch."""
        return self.dcn * self.data * self.fsdp * self.expert

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh, over all devices unless others are given; of one, over the first.

        Neighbours on an axis are neighbours in a TPU's torus where that can be. Each
        slice is one place on `dcn`; of devices that know no slices, as CPUs, equal
        parts in their order.

        Raises:
          InputError: the axes do not multiply to the number of devices, or `dcn` is not
            the number of their slices.
        """
        if devices is None:
            devices = jax.devices()
        if self.size == 1 and jax.process_count() == 1:
            devices = devices[:1]
        if len(devices) != self.size:
            raise InputError(
                f"mesh: expected axes that multiply to the {len(devices)} devices, got "
                f"{str(self).replace(',', ' · ')} = {self.size}; change an axis, or "
                f"give other devices"
            )
        # A mesh without slices or experts is the one that it was before there were any.
        names = [
            axis
            for axis in AXES
            if axis not in ("dcn", "expert") or getattr(self, axis) > 1
        ]
        shape = tuple(getattr(self, axis) for axis in names)
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        if self.dcn > 1 and slices not in (1, self.dcn):
            raise InputError(
                f"mesh dcn: expected the {slices} slices of the devices, got {self.dcn}"
                f"; write dcn={slices}, and the other axes within a slice"
            )
        try:
            if self.dcn > 1 and slices > 1:
                laid = mesh_utils.create_hybrid_device_mesh(
                    (1, *shape[1:]),
                    (self.dcn, *(1,) * len(shape[1:])),
                    devices,
                    allow_split_physical_axes=True,
                )
            else:
                laid = mesh_utils.create_device_mesh(
                    shape, devices=devices, allow_split_physical_axes=True
                )
        except (NotImplementedError, AssertionError, ValueError):
            # Part of a torus, or one that these axes do not follow: any order is right,
            # and the order in which JAX lists the devices costs longer ways at most.
            laid = np.reshape(np.array(devices), shape)
        return Mesh(laid, names, axis_types=(AxisType.Auto,) * len(names))


def one_word(kind: Any, *, metavar: str) -> PrimitiveConstructorSpec[Any]:
    """What makes a type one option, a word that `kind.parse` reads and str writes."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: kind.parse(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


ONE_DEVICE = MeshShape()
MeshOption = Annotated[MeshShape, one_word(MeshShape, metavar="AXIS=SIZE,...")]
"""A MeshShape as one option of a command line."""
