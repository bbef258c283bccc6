"""A run folder as a record: its config, metrics, samples, timings and summary."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, metrics, parsing
from rlhf_jax.runs.alarms import ADVICE
from rlhf_jax.runs.metrics import finite
from rlhf_jax.runs.proof import run_files
from rlhf_jax.runs.snapshots import jsonl
from rlhf_jax.sweeps.planned import BEGUN

Row = Mapping[str, Any]
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as `metrics.Recorder` writes them
READ = (
    *(folder.CONFIG, run_files.SUMMARY),
    *("metrics.jsonl", "samples.jsonl", "timings.jsonl"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The files of a run, as far as they are written."""

    folder: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    metrics: list[Row]
    summary: dict[str, Any] | None  # None while it runs
    name: str  # shortest path that distinguishes it from the other runs
    faults: Sequence[str] = ()  # of its files
    unproven: Sequence[str] = ()  # of its files

    @property
    def samples(self) -> Iterator[Row]:
        """Yields the rows of samples.jsonl, read each time to save memory."""
        path = self.folder / "samples.jsonl"
        yield from (row for _, row in jsonl.lines(path)) if path.exists() else ()

    @property
    def timings(self) -> list[Row]:
        """Rows of timings.jsonl, read each time."""
        return [*metrics.read(self.folder / "timings.jsonl")]

    @functools.cached_property
    def stage(self) -> str:
        """The last stage that has begun."""
        return self.metrics[-1]["stage"]

    @functools.cached_property
    def names(self) -> set[str]:
        """The metrics with a finite value in some row."""
        return {
            name
            for row in self.metrics
            for name, value in row.items()
            if name not in ("stage", "step") and finite(value) is not None
        }

    @functools.cached_property
    def not_finite(self) -> dict[str, int]:
        """The metrics with NaN or an infinity, each with its first step of these."""
        first: dict[str, int] = {}
        for row in self.metrics:
            for name, value in row.items():
                if value in NOT_FINITE:
                    first.setdefault(name, row["step"])
        return first

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl of the last stage."""
        return [row for row in self.metrics if row["stage"] == self.stage]

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """Every alarm of every stage, in the form of summary.json."""
        if self.summary is not None and isinstance(self.summary.get("alarms"), list):
            return self.summary["alarms"]
        raised, active = [], set()
        for row in self.metrics:  # the run is under way, and has no summary
            names = set(row.get("alarms", ()))
            at = {"stage": row["stage"], "step": row["step"]}
            raised += [
                {**at, "name": name, "message": ADVICE.get(name, "")}
                for name in sorted(names - active)
            ]
            active = names
        return raised


def folders(paths: Sequence[Path]) -> list[Path]:
    """Returns the run folders at some paths; a sweep's folder stands for its runs."""
    run_folders: dict[Path, None] = {}
    for path in paths:
        try:
            runs, got = _runs_in(path)
        except OSError as error:  # the system refuses the path
            runs, got = [], str(error.strerror)
        if not runs:
            raise InputError(
                f"{path!s:.200}: expected the folder of a run, with {folder.CONFIG}, "
                f"or of a sweep, with {BEGUN}, got {got}; give the --out of a run"
            )
        run_folders |= dict.fromkeys(runs)
    return list(run_folders)


def _runs_in(path: Path) -> tuple[list[Path], str]:
    """The run folders at a path, or a description of what is there instead."""
    if (path / folder.CONFIG).is_file():  # perhaps a model's, which `read` refuses
        return [path], ""
    if (path / BEGUN).is_file():
        configs = sorted(path.glob(f"runs/*/*/{folder.CONFIG}"))  # see `sweeps.planned`
        return [config.parent for config in configs], "one without a run that has begun"
    if not path.is_dir():
        return [], "no folder"
    names = sorted(child.name for child in path.iterdir())
    return [], ", ".join(names[:4]) or "nothing"


def read_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Reads every run with at least one row of metrics, in run folders and sweeps.

    Returns:
      The runs, and the names of runs without a row yet.
    """
    places = folders(paths)
    names = short_names(places)
    all_runs = [read(at, name=name) for at, name in zip(places, names, strict=True)]
    runs = [run for run in all_runs if run is not None]
    waiting = [n for n, run in zip(names, all_runs, strict=True) if run is None]
    if not runs:
        raise InputError(
            f"{', '.join(map(str, paths)):.200}: expected rows in metrics.jsonl, got "
            f"none yet; wait for the first step"
        )
    _check_alike(runs)
    return runs, waiting


def read(place: Path, *, name: str) -> Run | None:
    """Reads a run; None if it has no row of metrics yet."""
    recorded = folder.recorded(place / folder.CONFIG)
    rows: list[Row] = [*metrics.read(place / "metrics.jsonl")]
    if not rows:
        return None
    done = (place / run_files.SUMMARY).exists()
    checked = run_files.check(place, only=READ)
    return Run(
        folder=place,
        config=recorded["config"],
        versions=recorded["versions"],
        metrics=rows,
        summary=folder.read_summary(place) if done else None,
        name=name,
        faults=checked.faults,
        unproven=checked.unproven,
    )


def short_names(places: Sequence[Path]) -> list[str]:
    """Returns the paths without the folders that all of them share."""
    parts = [place.resolve().parts for place in places]
    shared = 0
    while all(len(path_parts) > shared + 1 for path_parts in parts) and (
        len({path_parts[shared] for path_parts in parts}) == 1
    ):
        shared += 1
    return ["/".join(path_parts[shared:]) for path_parts in parts]


def without_seed(parts: Sequence[str]) -> str:
    """Returns the last part of a path that does not only name the seed."""
    *above, last = parts
    of_seed = last.lower().removeprefix("seed").strip("_-=").isdigit()
    return above[-1] if of_seed and above else last


def title(paths: Sequence[Path]) -> str:
    """Returns the question of the sweep of all runs; else their names without seeds."""
    places = [path.resolve() for path in paths]
    of_sweeps = {
        next((at for at in (place, *place.parents) if (at / BEGUN).is_file()), None)
        for place in places
    }
    (sweep,) = of_sweeps if len(of_sweeps) == 1 else (None,)
    if sweep is None:
        names = list(dict.fromkeys(without_seed(place.parts) for place in places))
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    try:
        results = parsing.read_object(sweep / "results.json", expected="", advice="")
        return str(results["question"]) or sweep.name
    except (InputError, KeyError):  # no results yet
        return sweep.name


def _check_alike(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        if not run.names & first.names:
            raise InputError(
                f"expected runs with metrics in common, got {first.folder} (stage "
                f"{first.stage}) and {run.folder} (stage {run.stage}), which share "
                f"none; give each a report of its own"
            )
