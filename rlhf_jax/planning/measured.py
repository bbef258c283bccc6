"""Compiled programs of a run on a mesh, and the memory in use while each of them runs.

    alive = other arrays + arguments + temporaries + results - aliases

While a program runs, arrays that it does not read stay in memory: its own figures do
not decide whether the run fits.
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
    """The chips and the compiler of a plan."""

    mesh: Mesh
    name: str  # of the chip
    chip: Chip
    compiler: str
    # Chips of a node or a slice; None if the links reach every chip.
    per_node: int | None = None
    near: int = 0  # bytes of a cache between kernels, as in `cost.cost`


class Measured(NamedTuple):
    """A compiled program, per chip."""

    program: Program
    sizes: dict[str, int]  # bytes; only the temporaries of a refused program
    refused: str | None  # why the compiler refused it; None if it did not
    cost: Cost
    once: Cost | None = None  # the part of `cost` outside of loops over tokens


class Alive(NamedTuple):
    """Bytes on a chip while a program runs."""

    during: str  # name of the program
    others: int  # arrays that the program does not read
    argument: int
    temporary: int
    output: int
    alias: int  # part of the output that reuses the memory of arguments
    total: int


def target(topology: str | None, *, chip: str | None, mesh: MeshShape) -> Target:
    """The chips to plan for, as a mesh, and their compiler.

    Args:
      topology: such as v5e:8x8; None compiles with this machine's own compiler.
      chip: whose figures are used without a topology; None is this machine's.

    Raises:
      InputError: the topology or chip is unknown, or the mesh has another size.
    """
    if topology is not None:
        name, named, _ = topology.partition(":")
        if named:  # otherwise `slice_of` says what is missing
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
        # A CPU on which no program has run yet gets as many virtual devices as the mesh
        # has; otherwise `make` says what is missing.
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
    # All of them first, so that errors come before any compilation.
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
    """The mesh of a program: its own over the same chips, or the run's."""
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
      rows: of a batch, which `waiting` shows.
      waiting: a context that shows what is being compiled.
      visits: from `workload.block_visits`; memory figures do not need them.

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
        # The message has the size of the temporaries, and no other figure.
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
    """Bytes on a chip while a program runs, from the bytes of resident parts."""
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

    `num_chips` chips share its model FLOPs.
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
    """Seconds of a chip's part of a program at each of its peak rates.

    `network_bytes` is the part of `sent_bytes` that leaves the node. Each of the
    `exchanges` takes the chip's latency.
    """
    return {
        "products": flops / chip.flops,
        "memory": memory_bytes / chip.bandwidth,
        "links": (sent_bytes - network_bytes) / chip.links,
        "network": network_bytes / chip.network if chip.network else 0.0,
        "latency": exchanges * chip.latency,
    }


def bound_of(seconds: dict[str, float], *, waits: bool) -> float:
    """The least time of a program: all rates run at once.

    Latencies are added if the program `waits`, as every product of a decoded token
    waits for the exchange before it.
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
    """model FLOPs / (seconds · chips · peak FLOPs per second of a chip), at most 1.

    `flops` is what the model needs on all chips (`model_flops`). None if `seconds` is
    0, as for a refused program.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    return flops / (seconds * num_chips * chip.flops) if seconds else None
