"""Moves tokens to their experts and back, on one device or between devices.

On a mesh every device sorts its own tokens; `shard_map` keeps the compiler from sorting
all of them. Weights are sharded over `expert`, a share of the experts per device, and
over `tensor`, a share of every expert's width. Devices of `expert` exchange rows, not
weights, by one all-to-all there and one back:

    device          0                    1                 2 experts on each
    its rows        e0 e1 e2 e2          e1 e3 e3 e3
    sent to 0       e0 e1 ·  ·           e1 ·  ·  ·        room for all of its rows
    sent to 1       e2 e2 ·  ·           e3 e3 e3 ·
    multiplied      e0 e1 e1             e2 e2 e3 e3 e3

No row is dropped: every device has room for all rows of all devices. TPUs and GPUs send
only actual rows (`jax.lax.ragged_all_to_all`); a CPU sends the empty places too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlhf_jax.models import axes
from rlhf_jax.models.experts.grouped import Load, grouped_product

Array = jax.Array
# "up", "gate" and "down": {"kernel": [E, in, out], "bias": [E, out], "lora_a": ...}.
Weights = Mapping[str, Mapping[str, Array]]
Gate = Callable[[Array, Array], Array]  # (up, gate) -> the input of `down`


def mixed(
    x: Array, chosen: Array, shares: Array, *, weights: Weights, gate: Gate
) -> Array:
    """y = Σ_e w_e · down_e(gate(up_e x, gate_e x)) over the experts e of every token.

    Args:
      x: floats[N, D].
      chosen, shares: i32[N, k] and f32[N, k], the experts of every token and their w_e.
      weights: of all E experts, in x's dtype.

    Returns:
      [N, D], in x's dtype.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: mesh.shape[axis] for axis in {*mesh.shape} - {*mesh.manual_axes}}
    if math.prod(sizes.values()) == 1:
        return _of_device(x, chosen, shares, weights=weights, gate=gate)
    rows = tuple(axis for axis in axes.ACTIVATION_AXES if axis in sizes)
    devices = math.prod(sizes[axis] for axis in rows)
    room = -x.shape[0] % devices
    by_row = PartitionSpec(rows)
    expert = axes.EXPERT_AXIS if sizes.get(axes.EXPERT_AXIS, 1) > 1 else None
    tensor = axes.TENSOR_AXIS if sizes.get(axes.TENSOR_AXIS, 1) > 1 else None
    # The matrix of an adapter on the side of D is not sharded.
    inward = {
        "kernel": (None, tensor),
        "bias": (tensor,),
        "lora_a": (None, None),
        "lora_b": (None, tensor),
    }
    outward = {
        "kernel": (tensor, None),
        "bias": (None,),
        "lora_a": (tensor, None),
        "lora_b": (None, None),
    }
    specs = {
        name: {
            leaf: PartitionSpec(expert, *(outward if name == "down" else inward)[leaf])
            for leaf in leaves
        }
        for name, leaves in weights.items()
    }

    def local(x: Array, chosen: Array, shares: Array, weights: Weights) -> Array:
        y = _of_device(
            x, chosen, shares, weights=weights, gate=gate, expert=expert, tensor=tensor
        )
        return y if tensor is None else jax.lax.psum(y, tensor)

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_row, by_row, by_row, specs),
        out_specs=by_row,
        axis_names=set(sizes),
        check_vma=False,
    )

    def padded(array: Array) -> Array:
        return jnp.pad(array, ((0, room), (0, 0)))

    y = split(padded(x), padded(chosen), padded(shares), weights)
    return y[: x.shape[0]]


def _of_device(
    x: Array,
    chosen: Array,
    shares: Array,
    *,
    weights: Weights,
    gate: Gate,
    expert: str | None = None,
    tensor: str | None = None,
) -> Array:
    """`mixed` for the tokens of this device, with its share of the experts' weights."""
    own = weights["up"]["kernel"].shape[0]
    devices = 1 if expert is None else jax.lax.axis_size(expert)
    # Stable, so that the order of sums does not depend on other tokens.
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    group = chosen.reshape(-1)[order]
    sizes = _sizes(group, own * devices)
    rows = x[order // chosen.shape[1]]

    # If routing is even, a device receives as many rows as it sends; `missed` is the
    # share of experts without a token.
    missed = (1 - chosen.shape[1] / (own * devices)) ** (x.shape[0] * devices)
    load = Load(rows.shape[0], own * (1 - missed))

    def compute(rows: Array, group: Array, sizes: Array) -> Array:
        return _experts(
            *(rows, group, sizes), load=load, weights=weights, gate=gate, tensor=tensor
        )

    if expert is None:
        rows = compute(rows, group, sizes)
    else:
        rows = _exchanged(rows, group, sizes, compute=compute, axis=expert)
    rows = rows[jnp.argsort(order)].reshape(*chosen.shape, -1).astype(jnp.float32)
    return (rows * shares[..., None]).sum(axis=1).astype(x.dtype)


def _sizes(group: Array, count: int) -> Array:
    """i32[count], rows of each group; `group` is sorted."""
    numbers = jnp.arange(count, dtype=jnp.int32)
    ends = jnp.searchsorted(group, numbers, side="right").astype(jnp.int32)
    return jnp.diff(ends, prepend=jnp.zeros(1, jnp.int32))


def _experts(
    x: Array,
    group: Array,
    sizes: Array,
    *,
    load: Load,
    weights: Weights,
    gate: Gate,
    tensor: str | None,
) -> Array:
    """down(gate(up x, gate x)) of sorted rows, each by its expert.

    With `tensor` the result is this device's term of a sum.

    Args:
      group: i32[M], the expert of each row; the number of experts for an empty row.
    """

    def linear(name: str, x: Array) -> Array:
        own = weights[name]
        product = functools.partial(grouped_product, sizes=sizes, load=load)
        y = product(x, own["kernel"])
        if "lora_a" in own:
            y = y + product(product(x, own["lora_a"]), own["lora_b"])
        if "bias" in own:
            # An empty row gets no bias: its gradient has no meaning.
            bias = own["bias"].at[group].get(mode="fill", fill_value=0)
            if name == "down" and tensor is not None:
                # The devices' terms are summed: only one of them adds the bias.
                bias = jnp.where(jax.lax.axis_index(tensor) == 0, bias, 0)
            y = y + bias
        return y

    return linear("down", gate(linear("up", x), linear("gate", x)))


def _exchanged(
    rows: Array,
    group: Array,
    sizes: Array,
    *,
    compute: Callable[[Array, Array, Array], Array],
    axis: str,
) -> Array:
    """Calls compute(rows, group, sizes) with every row on the device of its expert."""
    devices, size = jax.lax.axis_size(axis), rows.shape[0]
    of_device = sizes.reshape(devices, -1)  # rows for each expert of each device
    own = of_device.shape[1]
    counts = of_device.sum(axis=1)
    start = jnp.cumsum(counts, dtype=jnp.int32) - counts
    coming = jax.lax.all_to_all(of_device, axis, 0, 0)
    arrived = _swapped(
        rows, start=start, counts=counts, coming=coming.sum(axis=1), axis=axis
    )
    # The expert of each place, or `own` if the place is empty.
    place = jnp.arange(size, dtype=jnp.int32)
    ends = jnp.cumsum(coming, axis=1, dtype=jnp.int32)
    number = jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))(ends)
    number = number.astype(jnp.int32).reshape(-1)
    order = jnp.argsort(number, stable=True)
    computed = compute(arrived[order], number[order], coming.sum(axis=0))
    computed = computed[jnp.argsort(order)]
    # Rows from device s are in its places again, and return there.
    back = _returned(computed, counts=counts, coming=coming.sum(axis=1), axis=axis)
    device = group // own
    return back[device * size + jnp.arange(size, dtype=jnp.int32) - start[device]]


def _swapped(
    rows: Array, *, start: Array, counts: Array, coming: Array, axis: str
) -> Array:
    """[G·M, D], the rows that each device sends here; device s fills places from s·M.

    Args:
      start, counts: i32[G], first row and number of rows sent to each device.
      coming: i32[G], number of rows received from each.
    """
    devices, size = counts.shape[0], rows.shape[0]

    def with_room(rows: Array) -> Array:
        place = jnp.arange(size, dtype=jnp.int32)
        at = jnp.minimum(start[:, None] + place[None], size - 1)
        filled = (place[None] < counts[:, None])[..., None]
        sent = jnp.where(filled, rows[at], jnp.zeros((), rows.dtype))
        return jax.lax.all_to_all(sent, axis, 0, 0).reshape(devices * size, -1)

    def ragged(rows: Array) -> Array:
        first = jax.lax.axis_index(axis).astype(jnp.int32) * size
        return jax.lax.ragged_all_to_all(
            rows,
            jnp.zeros((devices * size, rows.shape[1]), rows.dtype),
            *(start, counts, jnp.broadcast_to(first, (devices,)), coming),
            axis_name=axis,
        )

    return jax.lax.platform_dependent(rows, cpu=with_room, default=ragged)


def _returned(rows: Array, *, counts: Array, coming: Array, axis: str) -> Array:
    """[G·M, D], the rows of `_swapped`, returned to the devices that sent them."""
    devices = counts.shape[0]
    size = rows.shape[0] // devices

    def with_room(rows: Array) -> Array:
        parts = rows.reshape(devices, size, -1)
        return jax.lax.all_to_all(parts, axis, 0, 0).reshape(rows.shape)

    def ragged(rows: Array) -> Array:
        first = jax.lax.axis_index(axis).astype(jnp.int32) * size
        return jax.lax.ragged_all_to_all(
            rows,
            jnp.zeros_like(rows),
            jnp.arange(devices, dtype=jnp.int32) * size,
            coming,
            jnp.broadcast_to(first, (devices,)),
            counts,
            axis_name=axis,
        )

    return jax.lax.platform_dependent(rows, cpu=with_room, default=ragged)
