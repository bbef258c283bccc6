"""What chips receive when a copy of the policy is brought to the sampler's layout.

    fsdp=4              data=2,tensor=2
    chip 0   rows 0      columns 0   has a quarter of what it needs, and receives
    chip 1   rows 1      columns 1   the other three
    chip 2   rows 2      columns 0
    chip 3   rows 3      columns 1

Once per iteration, before the first token. No compiler is asked: who has which part of
an array follows from both shardings.
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
    """Bytes of a chip, the most of all chips."""

    bytes: int  # that it receives
    across: float  # its share of what its node takes from other nodes
    written: int  # its part of the new copy


def described(one: Measured, target: Target) -> dict[str, Any] | None:
    """What it takes to bring a program's arguments to its mesh from the target's.

    Returns:
      A row of the plan's JSON (`measured.described`); None where nothing is brought.
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
        "exchanges": 0,  # as many as there are leaves, once: nothing beside the bytes
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
    """The least that chips receive to hold a tree as another mesh shards it.

    A chip receives what its new part has and its old one has not. A node takes what
    none of its chips has once, each of them an equal share.

    Args:
      tree: parameters, arrays or shapes, in the dtype that they travel in.
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
            # Parts of one sharding are equal or have nothing in common.
            before, after = np.unique(before, axis=0), np.unique(after, axis=0)
            stays = _overlap(after[:, None], before[None]).sum()
            of_node[node] += size * (_overlap(after, after).sum() - stays)
    across = 0.0 if per_node is None else float(of_node.max()) / per_node
    return Received(int(lacking.max()), across, int(written.max()))


def _parts(where: NamedSharding, shape: tuple[int, ...]) -> Array:
    """i64[chips, dimensions, 2], where each chip's part begins and ends, by its id."""
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
    """Elements that two parts have in common."""
    begin = np.maximum(first[..., 0], second[..., 0])
    end = np.minimum(first[..., 1], second[..., 1])
    return np.prod(np.maximum(end - begin, 0), axis=-1)
