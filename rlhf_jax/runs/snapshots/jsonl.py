"""Lines of a run's JSON Lines files: what they must be, and how a resume cuts them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.runs import parsing
from rlhf_jax.runs.folder import write_text

ROW: parsing.Shape = {  # of any of the files
    "stage": str,
    "step": int,
    "alarms?": [str],
    "phases?": {},
    "waits?": {},  # of a queue "trainer" and "sampler", of an outside sampler its own
}


def strict(value: Any) -> Any:
    """A JSON value whose NaN and infinities are strings: JSON has no such numbers."""
    if isinstance(value, list):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


class Line(NamedTuple):
    """Where a line of a file belongs, and how long it is with its end."""

    stage: str
    step: int
    size: int  # bytes


def lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every complete line of a file, as bytes and as a row, one at a time.

    A last line without its end was cut off, and is left out.

    Raises:
      InputError: a line is not a row with a stage and a step; names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield line, _parse(line[:-1], path, number)


def places(path: Path) -> list[Line]:
    """All lines of a file, without what they hold.

    Raises:
      InputError: as `lines`.
    """
    return [Line(row["stage"], row["step"], len(line)) for line, row in lines(path)]


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


def cut(path: Path, there: Sequence[Line], *, step: int, begun: Sequence[str]) -> None:
    """Drops the rows of the last stage in `begun` from `step` on; the others' stay.

    Its rows move behind those of the stages begun before it, of which one that went
    back has written its last rows again.

    Args:
      there: `places` of the file.
    """
    *earlier, stage = begun
    keeps = [line.stage != stage or line.step < step for line in there]
    kept = [line for line, keep in zip(there, keeps, strict=True) if keep]
    order = [
        line.stage for line in kept if line.stage == stage or line.stage in earlier
    ]
    moves = order != sorted(order, key=begun.index)
    if moves or sum(line.size for line in kept) < path.stat().st_size:
        with path.open("rb") as file:
            # Without a last line that was cut off, which is in no place.
            texts = [text for text, keep in zip(file, keeps, strict=False) if keep]
        if moves:
            rows = sorted(
                zip(kept, texts, strict=True), key=lambda x: x[0].stage == stage
            )
            texts = [text for _, text in rows]
        write_text(path, b"".join(texts).decode())
