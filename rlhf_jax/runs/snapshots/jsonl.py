"""Reads the lines of a run's JSON Lines files, and cuts them for a resume."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.functional.errors import refuse
from rlhf_jax.runs import parsing
from rlhf_jax.runs.folder import write_text
from rlhf_jax.runs.proof import run_files, sums
from rlhf_jax.runs.snapshots import resume

EVERY_STEP = ("metrics", "timings")  # have one row per step
ROWS = "rows"  # key in a snapshot's meta: the number of rows of each file
LOST = (
    "put the file back as it was, or go on without them with --accept-lost-rows, which "
    "does not affect training"
)

ROW: parsing.Shape = {  # of any of the files
    "stage": str,
    "step": int,
    "alarms?": [str],
    "phases?": {},
    "waits?": {},  # a queue has "trainer" and "sampler", an outside sampler its own
}


def strict(value: Any) -> Any:
    """Returns a value with NaN and infinities as strings, since JSON lacks them."""
    if isinstance(value, list):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


class Line(NamedTuple):
    """The stage, step and size of a line."""

    stage: str
    step: int
    size: int  # bytes, the line feed included


def lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each complete line of a file, as bytes and as a row.

    A last line without a line feed is truncated, and is left out.

    Raises:
      InputError: a line is not a row with a stage and a step; names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield line, _parse(line[:-1], path, number)


def places(path: Path) -> list[Line]:
    """Returns stage, step and size of every complete line.

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


def require_rows(folder: Path) -> None:
    """Checks the rows of a run that is to be resumed, before anything is loaded.

    Raises:
      InputError: they are not those that the newest snapshots were saved with.
    """
    for stage, (step, meta) in resume.newest_metas(folder, having=ROWS).items():
        saved = meta.get(run_files.FILES, {})
        for name, count in meta[ROWS].items():
            path, of = folder / f"{name}.jsonl", saved.get(f"{name}.jsonl")
            if of is not None and _sum(path, stage, of) == of:
                continue  # without parsing the lines
            lines = places(path) if path.exists() else []
            why = lost_rows(path, lines, stage=stage, step=step, count=count, of=of)
            refuse([f"{why}; {LOST}"] if why else [])


def steps_of(lines: Sequence[Line], *, stage: str, before: int) -> list[int]:
    """Returns the steps of a stage's rows that are before a step."""
    return [at.step for at in lines if at.stage == stage and at.step < before]


def _sum(path: Path, stage: str, of: sums.Sum) -> sums.Sum:
    """The sum of as many bytes of a stage's rows as another sum has."""
    return sums.of_rows(path, stage=stage, size=of[0]).now()


def lost_rows(
    path: Path,
    lines: Sequence[Line],
    *,
    stage: str,
    step: int,
    count: int | None,
    of: sums.Sum | None,
) -> str:
    """Says how a file's rows differ from those of a snapshot; "" if they do not.

    Args:
      lines: `places` of the file.
      step: number of the snapshot.
      count, of: number and sum of the stage's rows before `step` in the snapshot.
    """
    steps = steps_of(lines, stage=stage, before=step)
    if len(steps) == count and (of is None or _sum(path, stage, of) == of):
        return ""
    lost = sorted(set(range(step)) - set(steps))
    twice = sorted(at for at, n in collections.Counter(steps).items() if n > 1)
    which = " others" if len(steps) == count else ""
    if path.stem in EVERY_STEP:
        which += f" (missing are {ranges(lost)})" if lost else ""
        which += f" (more than once {ranges(twice)})" if twice else ""
    return (
        f"{path}: expected the {count} rows of {stage} that snapshot {step} was saved "
        f"with, got {len(steps)}{which}"
    )


def ranges(steps: Sequence[int]) -> str:
    """Returns steps as text, with neighbours joined: "step 3", "steps 1, 4 to 6"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:8]]
    more = ["and more"] if len(runs) > 8 else []
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown + more)}"


def cut(
    path: Path, all_lines: Sequence[Line], *, step: int, begun: Sequence[str]
) -> None:
    """Drops the rows of the last stage in `begun` from `step` on, and keeps all others.

    The remaining rows of that stage move behind those of the earlier stages, one of
    which may have gone back and appended its rows again.

    Args:
      all_lines: `places` of the file.
    """
    *earlier, stage = begun
    keeps = [line.stage != stage or line.step < step for line in all_lines]
    kept = [line for line, keep in zip(all_lines, keeps, strict=True) if keep]
    order = [
        line.stage for line in kept if line.stage == stage or line.stage in earlier
    ]
    moves = order != sorted(order, key=begun.index)
    if moves or sum(line.size for line in kept) < path.stat().st_size:
        with path.open("rb") as file:
            # A truncated last line has no place, and is left out.
            texts = [text for text, keep in zip(file, keeps, strict=False) if keep]
        if moves:
            rows = sorted(
                zip(kept, texts, strict=True), key=lambda x: x[0].stage == stage
            )
            texts = [text for _, text in rows]
        write_text(path, b"".join(texts).decode())
