"""The printed tables of `iteration.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import floor
from benchmarks.environments import OURS
from benchmarks.peers.line_protocol import Workload
from rlhf_jax.runs import report

PHASES = (*floor.PHASES, "iteration")
GB, MIB = 10**9, 2**20
PEER = "trl"  # the peer of the bounds
# {workload with lengths: largest ratio of rlhf_jax to PEER}. Measured on 2 cores, with
# a margin for other load on the machine.
BOUNDS: Mapping[str, Mapping[str, float]] = {
    "medium": {"cold start": 2.5, "start": 1.3, "peak": 1.15, "iteration": 0.8}
}


def median(rounds: Sequence[Mapping[str, float]], phase: str) -> float:
    """Median seconds of a phase."""
    return statistics.median(line[phase] for line in rounds)


def paired_ratio(
    ours: Sequence[Mapping[str, float]],
    theirs: Sequence[Mapping[str, float]],
    phase: str,
) -> float:
    """Median over rounds of ours / theirs; below 1 rlhf_jax is faster."""
    return statistics.median(_ratios(ours, theirs, phase))


def ratio(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], phase: str
) -> str:
    """The median ratio of wall seconds with its range, and that of CPU seconds."""
    wall = _ratios(ours, theirs, phase)
    shown = f"{statistics.median(wall):.2f} ({min(wall):.2f} - {max(wall):.2f})"
    mine, their = ([line.get("cpu") for line in lines] for lines in (ours, theirs))
    if None in (*mine, *their):
        return shown
    return f"{shown}, CPU {statistics.median(_ratios(mine, their, phase)):.2f}"


def _ratios(ours: Sequence[Any], theirs: Sequence[Any], phase: str) -> list[float]:
    pairs = zip(ours, theirs, strict=True)
    return [mine[phase] / their[phase] for mine, their in pairs]


def length(shape: Workload) -> float:
    """Mean tokens of a response."""
    return statistics.mean(shape.lengths or (shape.response_length,))


def compile_seconds(run: Mapping[str, Any]) -> float:
    """Compile seconds, or else the first iteration's seconds beyond the second's."""
    cold = run["cold"]
    if "compile" in cold:
        return cold["compile"]
    first, second = cold["warm_up"]
    return max(0.0, first - second)


def first_seconds(start: Mapping[str, Any]) -> float:
    """Seconds from the start of the process to the end of its first iteration."""
    return start["start_up"] + start["warm_up"][0]


def spread(rounds: Sequence[Mapping[str, float]], phase: str) -> str:
    """The median and the range, as text."""
    values = [line[phase] for line in rounds]
    low, high = min(values), max(values)
    return f"{statistics.median(values):.4g} ({low:.4g} - {high:.4g})"


def machine(this: Mapping[str, Any]) -> None:
    """Prints the machine and the rates on which the floors depend."""
    print(
        f"{this['cpu']}, {this['cores']} cores, {this['backend']} ({this['device']}): "
        f"{this['matmul_flops'] / GB:.4g} GFLOP/s in products, "
        f"{this['copy_bytes'] / GB:.4g} GB/s copied",
        flush=True,
    )


def workload(
    shape: Workload, measured: Mapping[str, Any], *, machine: Mapping[str, Any]
) -> bool:
    """Prints times, ratios and memory of all; returns whether the bounds hold."""
    runs, floor_seconds = measured["participants"], measured["floor"]
    if not runs:
        return True
    tokens = shape.num_prompts * length(shape)
    up_to = ""
    if shape.lengths:
        up_to = f"1 to {max(shape.lengths)}, mean {length(shape):.3g}, of "
    title = (
        f"{shape.name}: {shape.num_prompts} x ({shape.prompt_length} + {up_to}"
        f"{shape.response_length}), {shape.num_epochs} x {shape.num_minibatches}; "
        f"seconds, median (least - most)"
    )
    report.table(
        title,
        ("", *PHASES, "tokens/s"),
        [
            ("floor", *(f"{floor_seconds[phase]:.4g}" for phase in PHASES), None),
            *(
                (
                    name,
                    *(spread(run["rounds"], phase) for phase in PHASES),
                    tokens / median(run["rounds"], "iteration"),
                )
                for name, run in runs.items()
            ),
        ],
    )
    report.table(
        "Seconds / floor",
        ("", *PHASES),
        [
            (
                name,
                *(
                    median(run["rounds"], phase) / floor_seconds[phase]
                    for phase in PHASES
                ),
            )
            for name, run in runs.items()
        ],
    )
    if OURS in runs and len(runs) > 1:
        report.table(
            "Ours / peer, median (least - most) of the rounds' ratios",
            ("", *PHASES),
            [
                (
                    name,
                    *(
                        ratio(runs[OURS]["rounds"], run["rounds"], phase)
                        for phase in PHASES
                    ),
                )
                for name, run in runs.items()
                if name != OURS
            ],
        )
    report.table(
        "Start to first iteration, peak of memory (resident, after two); cold compiles",
        (
            "",
            "cold [s]",
            "compile [s]",
            "cold peak [MiB]",
            "start [s]",
            "peak [MiB]",
            "parameters",
        ),
        [
            (
                name,
                first_seconds(run["cold"]),
                compile_seconds(run),
                mib(run["cold"]["peak_bytes"]),
                first_seconds(run["start"]),
                mib(run["start"]["peak_bytes"]),
                run["start"]["parameters"],
            )
            for name, run in runs.items()
        ],
    )
    if machine["peak_flops"] is not None:
        utilisation(shape, runs, machine=machine)
    bounds = BOUNDS.get(shape.name, {}) if shape.lengths else {}
    if not bounds or not {OURS, PEER} <= {*runs}:
        return True
    mine, their = runs[OURS], runs[PEER]
    ratios = {
        "cold start": first_seconds(mine["cold"]) / first_seconds(their["cold"]),
        "start": first_seconds(mine["start"]) / first_seconds(their["start"]),
        "peak": mine["start"]["peak_bytes"] / their["start"]["peak_bytes"],
        "iteration": paired_ratio(mine["rounds"], their["rounds"], "iteration"),
    }
    return bounded(ratios, bounds, of=f"{OURS} / {PEER}")


def bounded(
    ratios: Mapping[str, float], bounds: Mapping[str, float], *, of: str
) -> bool:
    """Prints each ratio with its bound; returns whether all hold.

    Args:
      ratios: {measure: ours / theirs}.
      bounds: {measure: largest ratio}; other measures are not shown.
      of: the compared participants, for the title.
    """
    rows = [
        (name, ratios[name], most, "yes" if ratios[name] <= most else "NO")
        for name, most in bounds.items()
    ]
    report.table(f"Bounds: {of}", ("", "ratio", "at most", "holds"), rows)
    return all(ratio <= most for _, ratio, most, _ in rows)


def mib(size: float | None) -> float | None:
    """Bytes as MiB; None if unknown."""
    return None if size is None else size / MIB


def utilisation(
    shape: Workload, runs: Mapping[str, Any], *, machine: Mapping[str, Any]
) -> None:
    """Prints shares of the chip's peaks: FLOPs in the update, bytes in the rollout."""
    done = {phase: floor.total(steps) for phase, steps in floor.steps(shape).items()}
    report.table(
        "Share of the chip's peak (products in bfloat16)",
        ("", "MFU of the update", "bandwidth in the rollout"),
        [
            (
                name,
                done["update"].flops
                / median(run["rounds"], "update")
                / machine["peak_flops"],
                done["rollout"].bytes
                / median(run["rounds"], "rollout")
                / machine["peak_bytes"],
            )
            for name, run in runs.items()
        ],
    )
