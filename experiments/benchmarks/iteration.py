"""The speed of a PPO iteration, beside TRL, a PyTorch loop by hand, and Tunix.

    python experiments benchmarks.iteration --peers trl torch --output benchmark.json
    python experiments benchmarks.iteration --workloads tiny
    python experiments benchmarks.iteration --peers trl torch --workloads small \\
        --lengths lognormal --mean 0.29

Every participant is a process of its own (`peers/`) that runs the same workload: random
prompts without padding, responses that nothing ends, a GPT-2 with random weights in
float32 as policy, and of its size a reference and a critic, AdamW, temperature 1, a
reward of tokens. They take turns (A B A B), two iterations each, of which the second
counts, so that what else the machine does meets all of them, and a ratio is the median
of those within a round. While one computes the others wait, all of them in memory: of
GPT-2 small each takes up to 7.5 GB, so name fewer peers at a time where that is too
much. All are given huge pages where glibc has them.

With --lengths responses end by EOS, at the same token for all participants
(`lengths.py`): logits are masked as they are sampled. Ours then reads packed rows, and
takes part a second time without.

Every participant is started twice, as what a run compiles the next one finds on disk:
the first start tells what compiling takes, the second is the one that is measured.

Peers run in virtual environments that are made where they are missing, from the pinned
versions in `environments.py` (some GB, a few minutes). Without --peers ours runs
alone. The floor is what the machine's measured rates allow (`floor.py`).

Where ours does not keep to its bounds beside TRL (`tables.BOUNDS`: start, memory and
seconds of the workload medium with lengths), that is in the last table, and the exit
status is 1.

On 2 CPU cores gpt2-small with two peers takes 14 minutes, small 8, tiny 3. What was
measured, and on what: rlhf_jax/planning/README.md.
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
    """What to run."""
    peers: tuple[str, ...] = ()
    """Whom to run beside ours: trl, torch, tunix."""
    lengths: str | None = None
    """Where responses end: geometric, lognormal, or a file with a length per line; None
    is all columns."""
    mean: float = 0.29
    """Mean length of geometric and lognormal ones, as a share of the columns."""
    rounds: int = 7
    """Measured iterations of each participant, after two of warm-up."""
    environments: Path = Path("~/.cache/rlhf_jax/benchmark")
    """Where the peers' virtual environments are, or are made."""
    output: Path | None = None
    """JSON file of every number, with versions and machine."""
    limit: float = 900.0
    """Seconds that a participant may take for its start, or for a turn."""

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
        """Raises InputError: --lengths is no file, or has lengths beyond R."""
        even = WORKLOADS[name]
        if self.lengths is None:
            return even
        return lengths.uneven(even, lengths=self.lengths, mean=self.mean)


def machine() -> dict[str, Any]:
    """Its processor, and how fast it multiplies and copies now.

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
    """Of this checkout, with a mark if files differ from it; None outside of one."""
    command = ["git", "-C", FOLDER, "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        return process.stdout.strip() or None
    return None


def measure(
    workload: Workload, *, commands: dict[str, list[str | Path]], options: Config
) -> dict[str, Any]:
    """All participants through one workload, in turns.

    Args:
      commands: {participant: how it is started}.

    Returns:
      {"participants": {name: {"cold": first and last line of its first start, "start":
      first line of its second, "rounds": [...], "end": last line, and what it used
      while others had their turns}}, "failed": {name: why}}; who failed is in the
      latter alone.
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
                "TMPDIR": folder.name,  # what it leaves behind goes with it
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
    """Whether all were measured, and keep to their bounds (`tables.BOUNDS`)."""
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
        if options.output is not None:  # after each, so that none is lost
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
