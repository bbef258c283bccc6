"""Bytes that chips receive when a copy of the policy moves to the sampler's layout.

    fsdp=4              data=2,tensor=2
    chip 0   rows 0      columns 0   every chip has a quarter of what it needs, and
    chip 1   rows 1      columns 1   receives the other three quarters
    chip 2   rows 2      columns 0
    chip 3   rows 3      columns 1

This happens once per iteration, before the first token. No compiler is used: the two
shardings say which chip has which part of an array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rlhf_jax.devices import sharding
from rlhf_jax.planning import measured
from rlhf_jax.planning.measured import Measured, Target

Array = np.ndarray


class Received(NamedTuple):
    """Bytes of a chip, the maximum over all chips."""

    bytes: int  # received by the chip
    across: float  # its share of what its node receives from other nodes
    written: int  # its part of the new copy


def described(one: Measured, target: Target) -> dict[str, Any] | None:
    """The cost of moving a program's arguments from the target's mesh to its own.

    Returns:
      A row of the plan's JSON (`measured.described`); None if nothing moves.
    """
    if not one.program.resharded:
        return None
    arriving = received(
        [one.program.args[at] for at in one.program.resharded],
        source=target.mesh,
        target=measured.mesh_of(one.program, target),
        per_node=target.per_node,
    )
    moved = {
        "memory_bytes": arriving.written,
        "sent_bytes": arriving.bytes,
        "network_bytes": arriving.across,
        "exchanges": 0,  # one per leaf: their latency is negligible
    }
    seconds = measured.least_seconds(target.chip, flops=0.0, **moved)
    return {
        "name": f"resharding for {one.program.name}",
        "stage": one.program.stage,
        "refused": None,
        "bytes": {},
        "flops": 0.0,
        **moved,
        "seconds": {**seconds, "bound": max(seconds.values())},
        "by_hand": 0.0,
        "model_flops": 0.0,
        "mfu": 0.0,
        "turns": None,
        "seconds_of_turn": None,
        "collectives": [],
    }


def received(
    tree: Any, *, source: Mesh, target: Mesh, per_node: int | None = None
) -> Received:
    """The least bytes that chips receive to move a tree to another mesh.

    A chip receives the part of its new shard that its old shard lacks. A node receives
    what none of its chips has once, an equal share on each chip.

    Args:
      tree: parameters, arrays or shapes, in the dtype in which they are sent.
      source: the mesh that they are on.
      target: another mesh of the same chips.
      per_node: chips of a node, in the order of their ids; None is one node of all.
    """
    lacking = np.zeros(source.devices.size)
    written = np.zeros(source.devices.size)
    nodes = 1 if per_node is None else source.devices.size // per_node
    of_node = np.zeros(nodes)
    old, new = (sharding.shardings(tree, mesh=mesh) for mesh in (source, target))
    leaves = zip(*map(jax.tree.leaves, (tree, old, new)), strict=True)
    for leaf, old_sharding, new_sharding in leaves:
        has = _parts(old_sharding, leaf.shape)
        needs = _parts(new_sharding, leaf.shape)
        size = leaf.dtype.itemsize
        lacking += size * (_overlap(needs, needs) - _overlap(needs, has))
        written += size * _overlap(needs, needs)
        for node, (before, after) in enumerate(
            zip(np.split(has, nodes), np.split(needs, nodes), strict=True)
        ):
            # Shards of one sharding are equal or disjoint.
            before, after = np.unique(before, axis=0), np.unique(after, axis=0)
            stays = _overlap(after[:, None], before[None]).sum()
            of_node[node] += size * (_overlap(after, after).sum() - stays)
    across = 0.0 if per_node is None else float(of_node.max()) / per_node
    return Received(int(lacking.max()), across, int(written.max()))


def _parts(where: NamedSharding, shape: tuple[int, ...]) -> Array:
    """i64[chips, dimensions, 2], begin and end of each chip's shard, by chip id."""
    by_device = where.devices_indices_map(shape)
    ordered = sorted(by_device, key=lambda device: device.id)
    ends = [
        [
            part.indices(size)[:2]
            for part, size in zip(by_device[one], shape, strict=True)
        ]
        for one in ordered
    ]
    return np.array(ends, np.int64).reshape(len(ordered), len(shape), 2)


def _overlap(first: Array, second: Array) -> Array:
    """Number of elements that two shards have in common."""
    begin = np.maximum(first[..., 0], second[..., 0])
    end = np.minimum(first[..., 1], second[..., 1])
    return np.prod(np.maximum(end - begin, 0), axis=-1)
