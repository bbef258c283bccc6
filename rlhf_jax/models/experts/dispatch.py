"""Moves tokens to their experts and back, on one device or between devices.

On a mesh every device sorts its own tokens; `shard_map` keeps the compiler from sorting
all of them. Weights are sharded over `expert`, a share of the experts per device, and
over `tensor`, a share of every expert's width. Devices of `expert` exchange rows, not
weights, by one all-to-all there and one back:

    device          0                    1                 2 experts on each
    its rows        e0 e1 e2 e2          e1 e3 e3 e3
    sent to 0       e0 e1                e1
    sent to 1       e2 e2                e3 e3 e3
    multiplied      e0 e1 e1             e2 e2 e3 e3 e3

No row is dropped. A device has room for `ROOM` times an even share of the rows; when
more arrive anywhere along `expert`, its devices take further turns. TPUs and GPUs send
only actual rows (`jax.lax.ragged_all_to_all`); a CPU sends empty places too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlhf_jax.models import axes
from rlhf_jax.models.experts.grouped import TURNS, Load, grouped_product

Array = jax.Array
# "up", "gate" and "down": {"kernel": [E, in, out], "bias": [E, out], "lora_a": ...}.
Weights = Mapping[str, Mapping[str, Array]]
Gate = Callable[[Array, Array], Array]  # (up, gate) -> the input of `down`
ROOM = 2  # rows that a device receives in a turn, over an even share
LEAST = 1024  # rows that a device always has room for


def mixed(
    x: Array, chosen: Array, shares: Array, *, weights: Weights, gate: Gate
) -> Array:
    """y = Σ_e w_e · down_e(gate(up_e x, gate_e x)) over the experts e of every token.

    Args:
      x: floats[N, D].
      chosen, shares: i32[N, k] and f32[N, k], the experts of every token and their w_e.
        Expert E is none: such a row is not multiplied or sent, and adds 0.
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
    inward = {"kernel": (None, tensor), "bias": (tensor,)}
    inward |= {"lora_a": (None, None), "lora_b": (None, tensor)}
    outward = {"kernel": (tensor, None), "bias": (None,)}
    outward |= {"lora_a": (tensor, None), "lora_b": (None, None)}
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

    def padded(array: Array, value: int = 0) -> Array:
        return jnp.pad(array, ((0, room), (0, 0)), constant_values=value)

    none = weights["up"]["kernel"].shape[0]
    y = split(padded(x), padded(chosen, none), padded(shares), weights)
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
    size = order.shape[0]

    # If routing is even, a device receives as many rows as it sends; `missed` is the
    # share of experts without a token.
    missed = (1 - chosen.shape[1] / (own * devices)) ** (x.shape[0] * devices)
    load = Load(size, own * (1 - missed))
    compute = functools.partial(_experts, load=load, gate=gate, tensor=tensor)
    if expert is None:
        # What is computed for rows of no group, and its gradient, has no meaning.
        counted = (group < own)[:, None]
        rows = jnp.where(counted, x[order // chosen.shape[1]], 0)
        rows = jnp.where(counted, compute(rows, group, sizes, weights), 0)
        return _combined(rows, shares, order).astype(x.dtype)
    # Rows by device that sends them, device that receives them, and expert there.
    counts = jax.lax.all_gather(sizes.reshape(devices, own), expert)
    room = min(devices * size, max(ROOM * size, LEAST))
    most = counts.sum(axis=(0, 2)).max()  # rows that a device receives
    turns = jnp.int32(1) if room == devices * size else -(-most // room)
    turn = functools.partial(_turn, compute, room, expert)
    y: Any = _summed(turn, turns, (order, counts), (x, shares, weights))
    return y.astype(x.dtype)


def _combined(rows: Array, shares: Array, order: Array) -> Array:
    """f32[N, D], Σ_e w_e · row_e of every token."""
    rows = rows[jnp.argsort(order)].reshape(*shares.shape, -1).astype(jnp.float32)
    return (rows * shares[..., None]).sum(axis=1)


def _sizes(group: Array, count: int) -> Array:
    """i32[count], rows of each group; `group` is sorted, and ends with `count`s."""
    numbers = jnp.arange(count, dtype=jnp.int32)
    ends = jnp.searchsorted(group, numbers, side="right").astype(jnp.int32)
    return jnp.diff(ends, prepend=jnp.zeros(1, jnp.int32))


def _experts(
    x: Array,
    group: Array,
    sizes: Array,
    weights: Weights,
    *,
    load: Load,
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(turn: Any, turns: Array, routing: Any, arguments: Any) -> Array:
    """f32[N, D], Σ_n turn(routing, n, *arguments) over the turns n.

    The gradient reaches `arguments`, and computes each turn again.
    """

    def add(number: Array, total: Array) -> Array:
        return total + turn(routing, number, *arguments)

    zeros = jnp.zeros(arguments[0].shape, jnp.float32)
    with jax.named_scope(f"{TURNS}1"):
        return jax.lax.fori_loop(0, turns, add, zeros)


def _summed_backward(turn: Any, residuals: Any, gradient: Array) -> Any:
    turns, routing, arguments = residuals

    def add(number: Array, totals: Any) -> Any:
        _, pulled = jax.vjp(functools.partial(turn, routing, number), *arguments)
        return jax.tree.map(jnp.add, totals, pulled(gradient))

    zeros = jax.tree.map(jnp.zeros_like, arguments)
    with jax.named_scope(f"{TURNS}1"):
        return None, None, jax.lax.fori_loop(0, turns, add, zeros)


_summed.defvjp(lambda turn, *args: (_summed(turn, *args), args), _summed_backward)


def _turn(
    compute: Callable[[Array, Array, Array, Weights], Array],
    room: int,
    axis: str,
    routing: tuple[Array, Array],
    number: Array,
    x: Array,
    shares: Array,
    weights: Weights,
) -> Array:
    """f32[N, D], the terms of the rows that arrive in one turn, at most `room`.

    Rows that arrive at a device are ordered by sender, then by expert. A turn takes the
    next `room` of them:

        place          0  1  2  3  4
        at device 1    e2 e2 e3 e3 e3      two of device 0, three of device 1

    Args:
      routing: i32[M], the rows by expert, and i32[G, G, E/G], the rows from a device to
        a device for each expert there.
    """
    order, counts = routing
    rows, low = x[order // shares.shape[1]], number * room
    count = counts.sum(axis=2)
    begin = jnp.cumsum(count, axis=0, dtype=jnp.int32) - count
    place, end = (jnp.clip(at - low, 0, room) for at in (begin, begin + count))
    start = jnp.cumsum(count, axis=1, dtype=jnp.int32) - count
    start = start + jnp.clip(low - begin, 0, count)
    moved = end - place
    arrived = _sent(rows, start, place, moved, places=room, axis=axis)

    here = counts[:, jax.lax.axis_index(axis)]
    devices, own = here.shape
    ends = jnp.cumsum(here.reshape(-1), dtype=jnp.int32) - low
    chunk = jnp.searchsorted(ends, jnp.arange(room, dtype=jnp.int32), side="right")
    # The expert of each place, or `own` if the place is empty.
    group = jnp.where(chunk < devices * own, chunk % own, own).astype(jnp.int32)
    sizes = jnp.diff(jnp.clip(ends, 0, room), prepend=jnp.zeros(1, jnp.int32))
    by_expert = jnp.argsort(group, stable=True)
    computed = compute(
        arrived[by_expert],
        group[by_expert],
        sizes.reshape(devices, own).sum(axis=0),
        weights,
    )
    computed = computed[jnp.argsort(by_expert)]
    back = _sent(computed, place.T, start.T, moved.T, places=rows.shape[0], axis=axis)
    return _combined(back, shares, order)


def _sent(
    rows: Array, start: Array, place: Array, count: Array, *, places: int, axis: str
) -> Array:
    """[places, D]: rows that the devices along `axis` send to this one; 0 elsewhere.

    Args:
      start, place, count: i32[G, G], for a device that sends and one that receives: the
        first row to send, its place there, and the number of rows.
    """
    own = jax.lax.axis_index(axis)
    coming = count[:, own]

    def with_room(rows: Array) -> Array:
        width = jnp.arange(min(rows.shape[0], places), dtype=jnp.int32)
        sent = rows.at[start[own][:, None] + width[None]].get(mode="clip")
        parts = jax.lax.all_to_all(sent, axis, 0, 0)
        at = jnp.arange(places, dtype=jnp.int32)[None] - place[:, own][:, None]
        filled = (at >= 0) & (at < coming[:, None])
        sender = filled.argmax(axis=0)
        row = jnp.take_along_axis(at, sender[None], axis=0)[0]
        arrived = parts.at[sender, row].get(mode="clip")
        return jnp.where(filled.any(axis=0)[:, None], arrived, 0)

    def ragged(rows: Array) -> Array:
        return jax.lax.ragged_all_to_all(
            rows,
            jnp.zeros((places, rows.shape[1]), rows.dtype),
            *(start[own], count[own], place[own], coming),
            axis_name=axis,
        )

    return jax.lax.platform_dependent(rows, cpu=with_room, default=ragged)
