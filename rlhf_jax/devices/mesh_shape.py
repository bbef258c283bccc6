"""The sizes of a mesh's axes, as an option of the command line and as a `Mesh`.

    mesh = MeshShape(data=2, fsdp=4).make()                "data=2,fsdp=4"

| axis | what is sharded over it |
|---|---|
| dcn | rows, over slices joined by a data centre network; parameters as over data |
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
from rlhf_jax.functional.errors import refuse

AXES = ("dcn", "data", "fsdp", "expert", "context", "tensor")
MOST_DIGITS = 9  # of a size


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis of a mesh; on a command line "fsdp=4,tensor=2"."""

    data: int = 1
    """Devices that share the rows of a batch."""
    fsdp: int = 1
    """Devices that share the rows of a batch and the parameters."""
    tensor: int = 1
    """Devices that share heads, MLP width and vocabulary."""
    context: int = 1
    """Devices that share the columns of a row and the parameters."""
    expert: int = 1
    """Devices that share the rows of a batch and the experts of a mixture."""
    dcn: int = 1
    """Slices of TPUs that share the rows; each sums its own gradients first."""

    def __post_init__(self) -> None:
        refuse(
            f"mesh {name}: expected at least 1 device, got {size}; leave it out"
            for name, size in dataclasses.asdict(self).items()
            if size < 1
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "data=2,fsdp=4"; missing axes are 1.

        Raises:
          InputError: the text has another form or an unknown axis.
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
        """Number of devices."""
        return math.prod(dataclasses.astuple(self))

    @property
    def rows(self) -> int:
        """Devices that share the rows of a batch."""
        return self.dcn * self.data * self.fsdp * self.expert

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh over all devices, or those given; a mesh of one uses the first.

        Neighbours on an axis are neighbours in a TPU's torus where possible. Each slice
        is one index on `dcn`; devices without slices, such as CPUs, are cut into equal
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
        # A mesh without slices or experts has no axes for them.
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
            # Part of a torus, or axes that do not follow it: any order is correct, and
            # JAX's order of the devices can only make ways longer.
            laid = np.reshape(np.array(devices), shape)
        return Mesh(laid, names, axis_types=(AxisType.Auto,) * len(names))


def one_word(kind: Any, *, metavar: str) -> PrimitiveConstructorSpec[Any]:
    """Makes a type a one-word option, read by `kind.parse` and written by `str`."""
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
