"""A training command from its start to its end: seconds, memory, and what it did.

The command leaves a run folder with a row a step in timings.jsonl and metrics.jsonl, as
`rlhf-jax` does. It is watched from outside, so that nothing in it changes.
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
POLL = 0.25  # seconds between looks at memory
LAST_LINES = 15  # of the output of a command that fails


def run(
    command: Sequence[str],
    *,
    out: Path,
    num_steps: int,
    limit: float,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """One process, from its command to its end.

    Args:
      out: the run folder.
      num_steps: that the command is told to take.
      limit: seconds that it may take.
      variables: its environment.

    Returns:
      start: seconds to the end of the first update, of a run of one step, else None;
      step: mean seconds of the steps after `SKIPPED`, None where there is none;
      peak, whole: MiB of the process and those it started, at their most until the
        last step was over, and until the end;
      work: of `work_of`.

    Raises:
      PeerError: it failed, or took longer.
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
        # Ours writes a row a step late, but for the last.
        "start": metrics.stat().st_mtime - began if num_steps == 1 else None,
        "step": statistics.mean(counted) if counted else None,
        "peak": peak / MIB,
        "whole": whole / MIB,
        "work": work_of(out, rows),
    }


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSONL file; none of no file."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def resident(pid: int, *, before: set[int]) -> tuple[set[int], int]:
    """Processes of a tree, and bytes that they held at most so far, together.

    One that is not in `before` does not count yet: for an instant a process that is
    started shares all memory of the one that starts it.
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
    """Means over steps of tokens per prompt and response, and of the scores; drift."""
    names = ("response/length", "objective/scores")
    means = {name: statistics.mean(row[name] for row in rows) for name in names}
    if "prompt/length" in rows[0]:  # TRL's
        prompts = {row["prompt/length"] for row in rows}
    else:
        data = json.loads((out / "data.json").read_text(encoding="utf-8"))
        use = data["sources"][0]["uses"]["training"]
        prompts = {*use["lengths"]["prompt"].values()}  # median and longest
    if len(prompts) != 1:
        raise PeerError(f"expected prompts of one length, got {sorted(prompts)}")
    drift = rows[-1]["drift/relative"]
    return {"prompt/length": prompts.pop(), **means, "drift/relative": drift}
