"""What the compiler says of a run's programs on a mesh, and what is alive with each.

    alive = what it does not read + its arguments + temporaries + results - aliases

While one program runs, everything that it does not read stays where it is: its own
figures alone are no verdict.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import chips, compiled, cost, gpu_targets
from rlhf_jax.planning.chips import Chip
from rlhf_jax.planning.cost import Cost
from rlhf_jax.planning.workload import Program

Waiting = Callable[[str], AbstractContextManager[None]]


class Target(NamedTuple):
    """What is compiled for."""

    mesh: Mesh
    name: str  # of the chip
    chip: Chip
    compiler: str
    # Of a node or a slice, chips; None where the links reach every chip.
    per_node: int | None = None
    near: int = 0  # bytes of a cache between kernels, as `cost.cost` has it


class Measured(NamedTuple):
    """What the compiler says of one program, a chip."""

    program: Program
    sizes: dict[str, int]  # bytes; of one that was refused the temporaries alone
    refused: str | None  # why
    cost: Cost
    once: Cost | None = None  # of that what is outside of loops over tokens


class Alive(NamedTuple):
    """What is on a chip while a program runs, bytes."""

    during: str
    others: int  # that it does not read
    argument: int
    temporary: int
    output: int
    alias: int  # of the output, which takes the place of arguments
    total: int


def target(topology: str | None, *, chip: str | None, mesh: MeshShape) -> Target:
    """The chips, as a mesh, and the compiler that stands for them.

    Without a topology this machine's own compiler stands in for the chip; None is the
    chip of this machine.

    Raises:
      InputError: there is no such topology or chip, or the mesh has another size.
    """
    if topology is not None:
        name, named, _ = topology.partition(":")
        if named:  # or the compiler says what is missing
            chips.named(name)
        made = mesh.make(compiled.slice_of(topology, slices=mesh.dcn))
        if gpu_targets.is_gpu(topology):
            compiler = f"that of {gpu_targets.compiler()}"
            per_node, near = gpu_targets.per_node(topology), gpu_targets.cache(topology)
            figures = chips.named(name)
            if figures.network is None and per_node < mesh.size:
                raise InputError(
                    f"topology: expected one node of {name}, for whose network no data "
                    f"sheet has a figure, got {topology!r}; plan a node"
                )
            return Target(made, name, figures, compiler, per_node, near)
        compiler = f"that of libtpu {importlib.metadata.version('libtpu')}"
        of_slice = mesh.size // mesh.dcn if mesh.dcn > 1 else None
        return Target(made, name, chips.named(name), compiler, of_slice)
    if mesh.size > 1:
        # As many virtual devices as the mesh has, where this machine is a CPU and no
        # program has run yet; else the mesh says what is missing.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", mesh.size)
    made = mesh.make()
    device = made.devices.flat[0]
    own = chips.of_device(device)
    figures = own if chip is None else chips.named(chip)
    if figures is None:
        raise InputError(
            f"expected --topology, as v5e:8x8 or h100:8x8 (extras 'plan' and "
            f"'plan-cuda'), or one of --chip {', '.join(chips.CHIPS)}, got neither on "
            f"{device.device_kind}; name what the run is to fit"
        )
    note = "" if figures == own else ", whose layouts and fusions are not the chip's"
    compiler = f"this machine's, for {device.platform}{note}"
    return Target(made, chip or device.device_kind, figures, compiler)


def resident(parts: dict[str, Any], target: Target) -> dict[str, int]:
    """Bytes per chip of `Workload.parts`, as the compiler lays them out.

    Raises:
      InputError: an axis does not divide a dimension of a parameter; names both.
    """
    # All of them first: what does not divide is told before anything is compiled.
    where = sharding.shardings(parts, mesh=target.mesh)

    def size(name: str) -> int:
        empty = compiled.program(
            lambda _: 0,
            compiled.placed(parts[name], where[name]),
            device=target.mesh.devices.flat[0],
            keep_unused=True,
        )
        return empty.memory_analysis().argument_size_in_bytes

    with jax.set_mesh(target.mesh):
        return {name: size(name) for name in parts}


def mesh_of(program: Program, target: Target) -> Mesh:
    """The mesh that a program runs on: its own over the same chips, or the run's."""
    if program.mesh is None:
        return target.mesh
    return program.mesh.make(sorted(target.mesh.devices.flat, key=lambda one: one.id))


def measure(
    programs: list[Program],
    target: Target,
    *,
    rows: int,
    waiting: Waiting,
    visits: Mapping[str, float] = MappingProxyType({}),
) -> list[Measured]:
    """Compiles the programs of a step, `Workload.programs`.

    Args:
      rows: of a batch, for what `waiting` shows.
      visits: from `workload.block_visits`; bytes alone do not need them.

    Raises:
      InputError: the row axes do not divide the rows, or sizes do not fit.
    """
    measurements = []
    for program in programs:
        with jax.set_mesh(mesh_of(program, target)):
            args = []
            for at, tree in enumerate(program.args):
                batch = at in program.batch
                place = row_sharding.row_shardings if batch else sharding.shardings
                args.append(compiled.placed(tree, place(tree)))
            what = f"{rows} rows on {target.mesh.size} x {target.name}"
            with waiting(f"compiling {program.name}, {what}"):
                measurements.append(
                    _compile(program, args, target=target, visits=visits)
                )
    return measurements


def _compile(
    program: Program, args: list[Any], *, target: Target, visits: Mapping[str, float]
) -> Measured:
    try:
        done = compiled.program(
            program.function,
            *args,
            device=target.mesh.devices.flat[0],
            donate=program.donate,
            keep_unused=True,
        )
    except compiled.RefusedError as error:
        # The compiler names what it would have needed, and nothing else.
        needed = re.search(r"temporaries \(([\d.]+)([MGT])\)", str(error))
        scale = {"M": 2**20, "G": 2**30, "T": 2**40}
        sizes = {}
        if needed is not None:
            sizes["temporary"] = int(float(needed[1]) * scale[needed[2]])
        return Measured(program, sizes, str(error), Cost())
    memory = done.memory_analysis()
    sizes = {
        "argument": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "host_argument": memory.host_argument_size_in_bytes,
    }
    text, never = done.as_text(), (0,) * len(program.trips)
    total, once = (
        cost.cost(
            text,
            trips=trips,
            named=visits,
            per_node=target.per_node,
            near=target.near,
        )
        for trips in (program.trips, never)
    )
    return Measured(program, sizes, None, total, once)


def alive(one: Measured, resident: dict[str, int]) -> Alive:
    """What is on a chip while a program runs, beside what is `resident`."""
    read = sum(resident[name] for name in one.program.reads)
    others = sum(resident.values()) - read
    argument = one.sizes.get("argument", read)
    temporary, output, alias = (
        one.sizes.get(name, 0) for name in ("temporary", "output", "alias")
    )
    total = others + argument + temporary + output - alias
    return Alive(one.program.name, others, argument, temporary, output, alias, total)


def described(one: Measured, chip: Chip, *, num_chips: int = 1) -> dict[str, Any]:
    """A program's bytes, work and least seconds, as JSON values.

    `num_chips` share the program's model FLOPs.
    """
    total, work = one.cost, _work(one.cost)
    seconds = least_seconds(chip, **work)
    waits = one.program.stage == "rollout"
    bound = bound_of(seconds, waits=waits)
    by_hand = {
        "products": one.program.model_flops / (num_chips * chip.flops),
        "memory": one.program.least_bytes / chip.bandwidth,
    }
    first, *others = one.program.trips
    turns = first * one.program.repeats + sum(others) if total.unknown_loops else None
    of_turn = None
    if turns and one.once is not None:
        once = least_seconds(chip, **_work(one.once))
        of_turn = {name: (all_ - once[name]) / turns for name, all_ in seconds.items()}
        of_turn["bound"] = bound_of(of_turn, waits=waits)
        of_turn["by_hand"] = by_hand["memory"] / turns
        if one.program.expert_bytes:
            of_turn["expert_bytes"] = one.program.expert_bytes / turns
        of_turn["exchanges"] = (total.exchanges - one.once.exchanges) / turns
    return {
        "name": one.program.name,
        "stage": one.program.stage,
        "refused": one.refused,
        "bytes": one.sizes,
        **work,
        "seconds": {**seconds, "bound": bound},
        "by_hand": max(by_hand.values()),
        "model_flops": one.program.model_flops,
        "mfu": mfu(
            one.program.model_flops, seconds=bound, chip=chip, num_chips=num_chips
        ),
        "turns": turns,
        "seconds_of_turn": of_turn,
        "collectives": [
            {**one._asdict(), "times": times, "sent": times * one.sent}
            for one, times in sorted(total.collectives.items())
        ],
    }


def least_seconds(
    chip: Chip,
    *,
    flops: float,
    memory_bytes: float,
    sent_bytes: float,
    network_bytes: float,
    exchanges: float,
) -> dict[str, float]:
    """Seconds that each of a chip's peak rates takes for its part of a program.

    Of the bytes that are sent to other chips `network_bytes` leave the node, and each
    of the `exchanges` takes the chip's latency.
    """
    return {
        "products": flops / chip.flops,
        "memory": memory_bytes / chip.bandwidth,
        "links": (sent_bytes - network_bytes) / chip.links,
        "network": network_bytes / chip.network if chip.network else 0.0,
        "latency": exchanges * chip.latency,
    }


def bound_of(seconds: dict[str, float], *, waits: bool) -> float:
    """The least time of a program: its rates go on at once.

    Where it `waits`, as each product of a decoded token does for the exchange before,
    latencies come on top.
    """
    latency = seconds["latency"]
    rates = max(part for name, part in seconds.items() if name != "latency")
    return rates + latency if waits else max(rates, latency)


def _work(total: Cost) -> dict[str, float]:
    return {
        "flops": total.flops,
        "memory_bytes": total.bytes,
        "sent_bytes": total.sent,
        "network_bytes": total.across,
        "exchanges": total.exchanges,
    }


def mfu(flops: float, *, seconds: float, chip: Chip, num_chips: int) -> float | None:
    """model FLOPs / (seconds · chips · peak FLOPs a second of a chip), a share of 1.

    `flops` is what the model needs, over all chips (`model_flops`). None of no time, as
    of a program that was refused.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    return flops / (seconds * num_chips * chip.flops) if seconds else None
