"""Measures a training command from outside: seconds, memory and the work done.

The command writes a run folder with one row per step in timings.jsonl and
metrics.jsonl, as `rlhf-jax` does.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environments import PeerError
from benchmarks.peers import line_protocol

MIB = 2**20
SKIPPED = 2  # steps that compile or allocate
POLL = 0.25  # seconds between measurements of memory
LAST_LINES = 15  # lines of output shown of a failed command


def run(
    command: Sequence[str],
    *,
    out: Path,
    num_steps: int,
    limit: float,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Runs a command in a process and measures it.

    Args:
      out: the run folder.
      num_steps: number of steps of the command.
      limit: longest duration, seconds.
      variables: environment variables of the process.

    Returns:
      start: seconds to the end of the first update in a run of one step, else None;
      step: mean seconds of the steps after the first `SKIPPED`, None without any;
      peak, whole: peak MiB of the process and its descendants, until the end of the
        last step and until the end;
      work: the result of `work_of`.

    Raises:
      PeerError: the command failed or exceeded the limit.
    """
    metrics = out / "metrics.jsonl"
    peak = whole = 0
    before: set[int] = set()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        began = time.time()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        try:
            while process.poll() is None and time.time() < began + limit:
                before, now = resident(process.pid, before=before)
                whole = max(whole, now)
                if len(rows_of(metrics)) < num_steps:
                    peak = whole
                time.sleep(POLL)
        finally:
            late = process.poll() is None
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read().splitlines()
    rows, timings = rows_of(metrics), rows_of(out / "timings.jsonl")
    if late or process.returncode or len(rows) != num_steps:
        status = (
            f"no end within {limit:g} s" if late else f"status {process.returncode}"
        )
        last = "".join(f"\n    {line}" for line in output[-LAST_LINES:])
        raise PeerError(
            f"expected {num_steps} steps, got {len(rows)} and {status}; the others go "
            f"on without it\n  last of its output:{last}"
        )
    counted = [row["seconds"] for row in timings[SKIPPED:]]
    return {
        # rlhf_jax writes a row one step late, except for the last row.
        "start": metrics.stat().st_mtime - began if num_steps == 1 else None,
        "step": statistics.mean(counted) if counted else None,
        "peak": peak / MIB,
        "whole": whole / MIB,
        "work": work_of(out, rows),
    }


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; none if the file does not exist."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def resident(pid: int, *, before: set[int]) -> tuple[set[int], int]:
    """The processes of a tree, and the sum of their peak resident bytes so far.

    A process that is not in `before` does not count yet, because a new process shares
    the memory of its parent for an instant.
    """
    pids, total = [pid], 0
    for one in pids:  # grows
        with contextlib.suppress(OSError):  # it has ended
            if one == pid or one in before:
                total += line_protocol.resident("VmHWM", process=one) or 0
            for thread in Path(f"/proc/{one}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
    return {*pids}, total


def work_of(out: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean tokens per prompt and response, mean scores, and the final drift."""
    names = ("response/length", "objective/scores")
    means = {name: statistics.mean(row[name] for row in rows) for name in names}
    if "prompt/length" in rows[0]:  # a peer's metric
        prompts = {row["prompt/length"] for row in rows}
    else:
        data = json.loads((out / "data.json").read_text(encoding="utf-8"))
        use = data["sources"][0]["uses"]["training"]
        prompts = {*use["lengths"]["prompt"].values()}  # median and longest
    if len(prompts) != 1:
        raise PeerError(f"expected prompts of one length, got {sorted(prompts)}")
    drift = rows[-1]["drift/relative"]
    return {"prompt/length": prompts.pop(), **means, "drift/relative": drift}
