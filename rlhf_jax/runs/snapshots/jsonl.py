"""Lines of a run's JSON Lines files: what they must be, and how a resume cuts them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.runs import parsing
from rlhf_jax.runs.folder import write_text

ROW: parsing.Shape = {  # of any of the files
    "stage": str,
    "step": int,
    "alarms?": [str],
    "phases?": {},
    "waits?": {"trainer": object},
}


def strict(value: Any) -> Any:
    """A JSON value whose NaN and infinities are strings: JSON has no such numbers."""
    if isinstance(value, list):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Every complete line of a file, as bytes and as a row.

    A last line without its end was cut off, and is left out.

    Raises:
      InputError: a line is not a row with a stage and a step; names file and line.
    """
    *complete, _ = path.read_bytes().split(b"\n")
    return [(line, _parse(line, path, n)) for n, line in enumerate(complete, start=1)]


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    source = parsing.Source(
        f"{path}:{number}",
        "an object with 'stage' and 'step'",
        "put the file back as it was, or remove the line and resume with "
        "--accept-lost-rows",
    )
    row = parsing.of_json(line, source, foreign=True)
    if (why := parsing.misfit(row, ROW)) is not None:
        raise source.refusal(why)
    return row


def ranges(steps: Sequence[int]) -> str:
    """Names steps, neighbours taken together: "step 3", or "steps 1, 4 to 6"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:8]]
    more = ["and more"] if len(runs) > 8 else []
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown + more)}"


def cut(path: Path, *, step: int, begun: Sequence[str]) -> None:
    """Drops the rows of the last stage in `begun` from `step` on; the others' stay.

    Its rows move behind those of the stages begun before it, of which one that went
    back has written its last rows again.
    """
    *earlier, stage = begun
    rows = [
        (line + b"\n", row["stage"])
        for line, row in lines(path)
        if row["stage"] != stage or row["step"] < step
    ]
    order = [of for _, of in rows if of == stage or of in earlier]
    moves = order != sorted(order, key=begun.index)
    if moves:
        rows.sort(key=lambda row: row[1] == stage)
    text = b"".join(line for line, _ in rows)
    if moves or len(text) < path.stat().st_size:
        write_text(path, text.decode())
