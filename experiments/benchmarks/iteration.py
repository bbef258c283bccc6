"""Compares the speed of a PPO iteration with TRL, Tunix and a PyTorch loop by hand.

    python experiments benchmarks.iteration --peers trl torch --output benchmark.json
    python experiments benchmarks.iteration --workloads tiny
    python experiments benchmarks.iteration --peers trl torch --workloads small \\
        --lengths lognormal --mean 0.29

Every participant is a process (`peers/`) that runs the same workload: random prompts
without padding, responses of fixed length, a GPT-2 with random weights in float32 as
policy, a reference and a critic of its size, AdamW, temperature 1 and a reward computed
from tokens. Participants take turns (A B A B) of two iterations, of which the second
counts. So other load on the machine affects all of them, and a ratio is the median of
the ratios within a round. While one computes the others wait in memory: with GPT-2
small each takes up to 7.5 GB, so name fewer peers at a time if memory is short. All use
huge pages if glibc supports them.

With --lengths responses end by EOS, at the same token for all participants
(`lengths.py`): logits are masked during sampling. rlhf_jax then packs rows, and takes
part a second time without packing.

Every participant is started twice, because a run finds the compiled programs of the
previous one on disk. The first start shows the cost of compilation, and the second is
measured.

Peers run in virtual environments, which are created if missing from the pinned versions
in `environments.py` (some GB, a few minutes). Without --peers rlhf_jax runs alone. The
floor is the bound by the machine's measured rates (`floor.py`).

If rlhf_jax exceeds its bounds relative to TRL (`tables.BOUNDS`: start, memory and
seconds of the workload medium with lengths), the last table shows it and the exit
status is 1.

On 2 CPU cores gpt2-small with two peers takes 14 minutes, small 8, tiny 3. The results
and their machines are in rlhf_jax/planning/README.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

from benchmarks import floor, lengths, tables
from benchmarks.environments import (
    FOLDER,
    OURS,
    OURS_PADDED,
    PEERS,
    PeerError,
    python_of,
    surroundings,
)
from benchmarks.participants import Participant
from benchmarks.peers.line_protocol import Workload
from benchmarks.workloads import WORKLOADS
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    """Workloads to run."""
    peers: tuple[str, ...] = ()
    """Peers to compare with: trl, torch, tunix."""
    lengths: str | None = None
    """Distribution of response lengths: geometric, lognormal, or a file with a length
    per line; None uses all columns."""
    mean: float = 0.29
    """Mean length of geometric and lognormal lengths, as a share of the columns."""
    rounds: int = 7
    """Measured iterations of each participant, after two of warm-up."""
    environments: Path = Path("~/.cache/rlhf_jax/benchmark")
    """Folder of the peers' virtual environments, which are created if missing."""
    output: Path | None = None
    """JSON file for all figures, versions and the machine; None writes none."""
    limit: float = 900.0
    """Longest start or turn of a participant, seconds."""

    def __post_init__(self) -> None:
        checks.positive(rounds=self.rounds, limit=self.limit, mean=self.mean)
        others = [name for name in PEERS if name not in (OURS, OURS_PADDED)]
        for option, names, known in (
            ("--workloads", self.workloads, list(WORKLOADS)),
            ("--peers", self.peers, others),
        ):
            unknown = [name for name in names if name not in known]
            if unknown or len({*names}) < len(names):
                raise InputError(
                    f"{option}: expected some of {', '.join(known)}, each once, got "
                    f"{', '.join(names)}; choose among them"
                )
        if not self.workloads:
            raise InputError(
                f"--workloads: expected at least one of {', '.join(WORKLOADS)}, got "
                f"none; name one"
            )
        for name in self.workloads:
            self.workload(name)
        if self.output is not None and not self.output.parent.is_dir():
            raise InputError(
                f"--output: expected a file in a folder that is there, got "
                f"{self.output}; make {self.output.parent} first"
            )

    def workload(self, name: str) -> Workload:
        """The workload with --lengths; InputError if they cannot be read or fit."""
        even = WORKLOADS[name]
        if self.lengths is None:
            return even
        return lengths.uneven(even, lengths=self.lengths, mean=self.mean)


def machine() -> dict[str, Any]:
    """The machine's processor, and its measured rates of products and copies.

    Raises:
      RuntimeError: the measurement failed.
    """
    process = subprocess.run(
        [sys.executable, FOLDER / "machine.py"],
        env=surroundings(None),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"peers/machine.py failed:\n{process.stderr}")
    cpuinfo, model = Path("/proc/cpuinfo"), platform.processor()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if "model name" in line]
        model = next(iter(names), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        **json.loads(process.stdout.splitlines()[-1]),
    }


def commit() -> str | None:
    """The commit of this checkout, marked if files differ; None outside a checkout."""
    command = ["git", "-C", FOLDER, "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        return process.stdout.strip() or None
    return None


def measure(
    workload: Workload, *, commands: dict[str, list[str | Path]], options: Config
) -> dict[str, Any]:
    """Runs all participants on one workload, in turns.

    Args:
      commands: {participant: its command}.

    Returns:
      {"participants": {name: {"cold": first and last line of the first start, "start":
      first line of the second, "rounds": [...], "end": last line, and the time used
      during other turns}}, "failed": {name: reason}}; failed participants are only in
      the latter.
    """
    measured: dict[str, Any] = {}
    failed: dict[str, str] = {}
    running: dict[str, Participant] = {}
    folder = tempfile.TemporaryDirectory(prefix="rlhf_jax-benchmark-")

    def start(name: str) -> Participant:
        return Participant(
            name,
            commands[name],
            workload=workload,
            limit=options.limit,
            variables=surroundings(PEERS[name].environment)
            | {
                "JAX_COMPILATION_CACHE_DIR": str(Path(folder.name) / name),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "TMPDIR": folder.name,  # temporary files are removed with the folder
            },
        )

    def left_out(name: str, error: PeerError) -> None:
        print(f"error: {error}", flush=True)
        failed[name] = str(error)
        running.pop(name, None)
        measured.pop(name, None)

    with contextlib.ExitStack() as stack:
        stack.enter_context(folder)
        for name in commands:
            began = time.perf_counter()
            try:
                with start(name) as first:
                    cold = first.ready() | first.end()
                running[name] = stack.enter_context(start(name))
                line = running[name].ready()
                measured[name] = {"cold": cold, "start": line, "rounds": []}
            except PeerError as error:
                left_out(name, error)
                continue
            seconds = time.perf_counter() - began
            print(f"{workload.name}: {name} ready after {seconds:.0f} s", flush=True)
        for _ in range(options.rounds):
            for name, participant in list(running.items()):
                try:
                    measured[name]["rounds"].append(participant.go())
                except PeerError as error:
                    left_out(name, error)
        for name, participant in list(running.items()):
            try:
                measured[name]["end"] = {
                    **participant.end(),
                    "idle_seconds": participant.idle_seconds,
                    "idle_cpu_seconds": participant.idle_cpu,
                }
            except PeerError as error:
                left_out(name, error)
    return {
        "workload": dataclasses.asdict(workload),
        "participants": measured,
        "failed": failed,
    }


def main(options: Config) -> bool:
    """Runs the benchmark; returns whether all were measured and `BOUNDS` hold."""
    hold = True
    folder = options.environments.expanduser()
    commands: dict[str, list[str | Path]] = {}
    left_out: dict[str, str] = {}
    for name in (OURS, OURS_PADDED, *options.peers):
        peer = PEERS[name]
        if peer.uneven and options.lengths is None:
            continue
        try:
            python = python_of(peer.environment, folder=folder)
        except PeerError as error:
            print(f"error: {error}", flush=True)
            left_out[name] = str(error)
            hold = False
        else:
            commands[name] = [python, FOLDER / peer.script, *peer.arguments]
    this = machine()
    rates = floor.Rates(this["matmul_flops"], this["copy_bytes"])
    results: dict[str, Any] = {
        "commit": commit(),
        "machine": this,
        "left_out": left_out,
        "workloads": {},
    }
    tables.machine(this)
    for name in options.workloads:
        workload = options.workload(name)
        measured = measure(workload, commands=commands, options=options)
        measured["floor"] = floor.floors(workload, rates=rates)
        results["workloads"][name] = measured
        hold &= tables.workload(workload, measured, machine=this)
        hold &= not measured["failed"]
        if options.output is not None:  # after each workload, so that none is lost
            text = json.dumps(results, indent=1)
            options.output.write_text(f"{text}\n")
    for name in commands:
        print(f"{name}: {PEERS[name].differs}")
    return hold


if __name__ == "__main__":
    try:
        sys.exit(not main(tyro.cli(Config, description=__doc__)))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
