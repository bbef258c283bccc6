"""How frozen parameters are stored: in which dtype, which memory, on which devices.

| storage | arguments |
|---|---|
| copy | none: the source's dtype and sharding |
| half | dtype bfloat16 or float16 |
| int8, weight-only | dtype int8; `embeddings` may keep tables in a float dtype |
| pinned host memory | memory "pinned_host": each layer is read when its turn comes |
| own sharding, own devices, the CPU | sharding |

Every storage is a copy, the decoder reads it through `leaves`, and all of them combine.
int8 does not use qwix, which replaces operations inside a module's call: here a leaf is
a plain pytree that the scan slices and the host streams.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import leaves
from rlhf_jax.models.leaves import Int8, OnHost

Array = jax.Array
Params = Any
Memory = Literal["device", "pinned_host"]
FLOATS = ("float32", "bfloat16", "float16")
WAYS: dict[str, dict[str, Any]] = {
    "copy": {},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "int8-bf16": {"dtype": "int8", "embeddings": "bfloat16"},
    "host": {"memory": "pinned_host"},
    # No int8 tables: the TPU compiler of jax 0.10 cannot fetch them from the host.
    "host-int8": {"dtype": "int8", "embeddings": "bfloat16", "memory": "pinned_host"},
}
"""Options of `store`, by short names of storages."""


def store(
    params: Params,
    *,
    dtype: Any = None,
    embeddings: Any = None,
    vectors: Any = None,
    memory: Memory | None = None,
    sharding: Any = None,
) -> Params:
    """Copies parameters into a storage that shares no buffer with them.

    `jnp.asarray`, `astype` to the same dtype and `device_put` to the same sharding all
    alias, and an alias dies when the original is donated; an explicit copy does not.
    Leaves are copied one at a time, so that a copy for the host or for other devices
    takes the space of one leaf on the devices of `params`.

    Args:
      params: pytree of arrays (NumPy or JAX) of a decoder, or {"trunk", "score"}; or
        the result of an earlier `store`.
      dtype: of the copy's floating-point leaves; None keeps each leaf's own. int8 is
        for matrices: symmetric, with a scale for every output channel (for every row of
        an embedding or an output head); norms, biases and a scalar head are float32.
      embeddings: dtype of embeddings and output head if `dtype` is int8; None is int8.
      vectors: dtype of norms, biases and scalar heads; None follows `dtype`.
      memory: "pinned_host" keeps the copy in the host's memory, "device" on the
        device; None keeps each leaf's memory.
      sharding: a Sharding, or a tree of them that is a prefix of `params`, for the
        copy; None keeps each leaf's sharding.

    Raises:
      InputError: an unknown dtype, int8 without a matrix, `embeddings` without int8, a
        memory that the devices lack, or a sharding that does not fit; names the leaf.
    """
    dtype = None if dtype is None else _dtype("dtype", dtype, among=(*FLOATS, "int8"))
    checks.one_of(memory=memory, among=(None, *get_args(Memory)))
    if embeddings is not None:
        embeddings = _dtype("embeddings", embeddings, among=FLOATS)
        check_embeddings(embeddings, dtype=dtype)
    if vectors is not None:
        vectors = _dtype("vectors", vectors, among=FLOATS)
    with_path, structure = jax.tree.flatten_with_path(params, is_leaf=leaves.is_stored)
    if dtype == jnp.int8 and not any(_matrix_axis(*item) for item in with_path):
        raise InputError(
            "dtype: int8 is for matrices under embed, head or layers, and there are "
            "none here; pass a decoder's parameters, or choose a float dtype"
        )

    def copy(path: Any, leaf: Any, place: Sharding | None) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        to_host = memory == "pinned_host"
        if isinstance(leaf, OnHost):
            to_host = memory != "device"
            leaf = jax.device_put(leaf.held, jax.memory.Space.Device)
        copied = _cast(path, leaf, dtype=dtype, embeddings=embeddings, vectors=vectors)
        if place is not None:
            copied = _place(name, copied, place)
        return _to_host(copied) if to_host else copied

    places = _broadcast(sharding, params, count=len(with_path))
    return jax.tree.unflatten(
        structure,
        [
            copy(path, leaf, place)
            for (path, leaf), place in zip(with_path, places, strict=True)
        ],
    )


def check_embeddings(embeddings: Any, *, dtype: Any) -> None:
    """Raises InputError for a dtype of embeddings if `dtype` is not int8."""
    if embeddings is not None and dtype != "int8":
        raise InputError(
            f"embeddings: expected None where dtype is {dtype}, got {embeddings}; only "
            f"int8 takes another dtype for embeddings"
        )


def copy_as(leaf: Array, *, like: Any) -> Any:
    """Copies a leaf with the dtype, memory and sharding of another."""
    if isinstance(like, OnHost):
        return OnHost(copy_as(leaf, like=like.held))
    if isinstance(like, Int8):
        # The axes that share a scale have size 1 in `scales`.
        shared = tuple(i for i, size in enumerate(like.scales.shape) if size == 1)
        copied = quantise(leaf, axis=shared)
    else:
        copied = jnp.array(leaf, dtype=like.dtype, copy=True)
    return jax.tree.map(place_as, copied, like)


def place_as(leaf: Array, like: Array) -> Array:
    """Moves a leaf to the devices and memory of another; the bits stay the same.

    A leaf stays uncommitted if `like` is, as `jit` would compile again for a committed
    one. While `jit` traces, the compiler knows the devices, and only the memory is set.
    """
    if isinstance(like, Tracer):
        # A sharding cannot be read off a tracer.
        return jax.device_put(leaf, jax.typeof(like).memory_space)
    return jax.device_put(leaf, like.sharding) if like.committed else leaf


def quantise(x: Array, *, axis: int | tuple[int, ...]) -> Int8:
    """Symmetric int8: scale = max|x| / 127 along `axis`, values = round(x / scale).

    Args:
      x: floats[...].
      axis: axes that share a scale: the inputs of a matrix, or the columns of a row.

    Returns:
      Int8; |values · scales - x| <= scale / 2. The scale of zeros is 0.

    Source: Dettmers et al. 2022, arXiv:2208.07339, section 2 (absmax, vector-wise).
    """
    # Scales in the source's 16 bits would add their own rounding to every value.
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127.0
    # A channel of zeros has scale 0, and any divisor leaves its values at 0.
    values = jnp.round(x / jnp.where(scales > 0, scales, 1.0))
    return Int8(values=values.astype(jnp.int8), scales=scales)


def nbytes(params: Params) -> int:
    """Bytes of the leaves, arrays or shapes; a leaf on many devices counts once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def check_memory(device: Any) -> None:
    """Raises InputError if the device lacks pinned_host; lists the memories it has."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise InputError(
            f"memory: expected one that {device.device_kind} has ({', '.join(kinds)}), "
            f"got pinned_host; leave memory out, or store on the CPU's devices with "
            f"sharding"
        )


def _dtype(name: str, dtype: Any, *, among: tuple[str, ...]) -> Any:
    try:
        kind = jnp.dtype(dtype).name
    except TypeError:
        kind = dtype
    checks.one_of(**{name: kind}, among=(None, *among))
    return jnp.dtype(kind)


def _matrix_axis(path: Any, leaf: Any) -> int | None:
    """The axis of a matrix that shares a scale; None for other leaves."""
    names = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
    if ("embed" in names or "head" in names) and len(leaf.shape) > 1:
        return -1
    # Kernels [L, in, out], or [L, E, in, out] of experts, share a scale along their
    # inputs; tables along their columns. A router needs its precision for near ties,
    # and the taps of a convolution are few and no matrix.
    vector = len(leaf.shape) < 3 or "bias" in names or "router" in names
    vector = vector or names[-1].endswith("_taps")
    return None if vector or "layers" not in names else -2


def _cast(path: Any, leaf: Any, *, dtype: Any, embeddings: Any, vectors: Any) -> Any:
    """Copies a leaf into the requested dtype, on its own devices."""
    axis = _matrix_axis(path, leaf)
    if axis is None and vectors is not None:
        dtype = vectors
    elif dtype == jnp.int8 and axis is None:
        dtype = jnp.float32
    elif axis == -1 and embeddings is not None:
        dtype = embeddings
    if isinstance(leaf, Int8):
        if dtype is None or dtype == jnp.int8:
            return jax.tree.map(lambda array: jnp.array(array, copy=True), leaf)
        leaf = leaf.read()
    leaf = jnp.asarray(leaf)
    if dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.array(leaf, copy=True)
    if dtype == jnp.int8 and axis is not None:
        return quantise(leaf, axis=axis)
    return jnp.array(leaf, dtype=dtype, copy=True)


def _broadcast(sharding: Any, params: Params, *, count: int) -> list[Any]:
    if sharding is None:
        return [None] * count
    try:
        whole = jax.tree.broadcast(sharding, params, is_leaf=leaves.is_stored)
    except ValueError as error:
        raise InputError(
            f"sharding: expected a Sharding, or a tree of them that is a prefix of the "
            f"parameters', got another structure: {error}"
        ) from error
    return jax.tree.leaves(whole)


def _place(name: str, copied: Any, place: Sharding) -> Any:
    if place.memory_kind == "pinned_host":
        raise InputError(
            f"sharding: expected the device's memory, got pinned_host for {name}; say "
            f"memory='pinned_host', so that the decoder knows to fetch it"
        )
    if isinstance(copied, Int8):
        scales = _of_scales(place, copied.scales)
        places = Int8(values=place, scales=scales)  # pyright: ignore[reportArgumentType]
    else:
        places = place
    try:
        return jax.device_put(copied, places)
    except ValueError as error:
        raise InputError(
            f"sharding: expected one that divides {name} {copied.shape}, got {place}; "
            f"replicate this leaf, or shard another axis: {error}"
        ) from error


def _of_scales(place: Sharding, scales: Array) -> Sharding:
    """Sharding of an Int8's scales: an axis of size 1 is replicated."""
    if not isinstance(place, NamedSharding):
        return place
    spec = zip(scales.shape, place.spec, strict=False)  # a spec may be shorter
    names = [None if size == 1 else axis for size, axis in spec]
    return NamedSharding(place.mesh, PartitionSpec(*names))


def _to_host(copied: Any) -> OnHost:
    for array in jax.tree.leaves(copied):
        if not isinstance(array, Tracer):  # for a tracer, the compiler reports it
            for device in array.sharding.device_set:
                check_memory(device)
    return OnHost(jax.device_put(copied, jax.memory.Space.Host))
