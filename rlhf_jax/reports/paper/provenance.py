"""Where the numbers of runs come from: models, data, versions and time.

Every value is read from the run folders, and none from the present machine. A value
that a folder lacks is None, and is reported as missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import grouping
from rlhf_jax.runs import folder, metrics, parsing, receipt
from rlhf_jax.runs.metrics import finite
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.sweeps.planned import Planned

MODELS = ("start.model", "model")  # options of trainers, and of other programs
DIGEST = 12  # digits of a digest in a text; runs.csv has all
FEW = 4  # values that a sentence lists
Values = Sequence[tuple[Planned, str | None]]  # (run, value); None is not recorded


@dataclasses.dataclass(frozen=True)
class Record:
    """The provenance of one run, from its folder."""

    run: Planned
    options: Mapping[str, Any]  # by names as in config.json, "start.model"
    versions: Mapping[str, str]
    sources: Sequence[Mapping[str, Any]]  # in data.json
    digests: Mapping[str, str]  # of the data, by stage and name
    fingerprint: str | None  # of the reference
    seconds: float | None  # of its steps

    @property
    def model(self) -> str | None:
        """The model that it started from."""
        named = [self.options[name] for name in MODELS if name in self.options]
        return str(named[0]) if named and named[0] is not None else None

    def option(self, name: str) -> str | None:
        """Returns an option as in config.json, by the last parts of its name.

        A choice with options of its own, which has several fields there, is returned as
        the sweep wrote it.
        """
        known = [one for one in self.options if f".{one}".endswith(f".{name}")]
        if len(known) == 1:
            return grouping.shown(self.options[known[0]])
        start = f"--{name.replace('_', '-')}="
        asked = [one for one in self.run.options if one.startswith(start)]
        return asked[0].removeprefix(start) if asked else None

    @property
    def data(self) -> str | None:
        """The sources of the data, each with the number of rows used."""
        shown = [
            f"{one['source']} ({one['name']}, {one['used']:,} of {one['read']:,} "
            f"{one['called']})"
            for one in self.sources
        ]
        return ", ".join(shown) or None

    def columns(self) -> dict[str, Any]:
        """Returns the run's row of runs.csv."""
        return {
            "cell": self.run.cell.name,
            "seed": self.run.seed,
            "model": self.model,
            "data": self.data,
            **{f"sha256 of {name}": value for name, value in self.digests.items()},
            "reference fingerprint": self.fingerprint,
            "seconds": self.seconds,
            **self.versions,
        }


def read(run: Planned) -> Record:
    """Reads the record of a finished run."""
    config = _read(run.folder / folder.CONFIG, {"config?": {}, "versions?": {}})
    data = _read(run.folder / receipt.NAME, receipt.SHAPE)
    timed = metrics.read(run.folder / "timings.jsonl")
    fingerprint = folder.read_summary(run.folder).get("reference_fingerprint")
    return Record(
        run=run,
        options=resume.flat(config.get("config") or {}),
        versions={
            name: str(value) for name, value in config.get("versions", {}).items()
        },
        sources=data.get("sources") or [],
        digests={
            f"{stage} {name.removesuffix('_digest')}": str(value)
            for stage, (_, meta) in resume.newest_metas(run.folder).items()
            for name, value in meta.items()
            if name.endswith("_digest")
        },
        fingerprint=fingerprint if isinstance(fingerprint, str) else None,
        seconds=sum(finite(row.get("seconds")) or 0.0 for row in timed)
        if timed
        else None,
    )


def _read(path: Path, shape: parsing.Shape) -> dict[str, Any]:
    """A JSON object; empty if there is none, as for a user's own program."""
    with contextlib.suppress(InputError):
        return parsing.read_object(path, expected="", advice="", shape=shape)
    return {}


def as_text(values: Values, *, all_in: str = "runs.csv") -> str | None:
    """Returns the value of all runs, or each value with the runs that have it.

    More than FEW values are only counted, and `all_in` names the file that lists them.
    If no run has a value, the result is None.
    """
    groups: dict[str | None, list[Planned]] = {}
    for run, value in values:
        groups.setdefault(value, []).append(run)
    if set(groups) <= {None}:
        return None
    if len(groups) == 1:
        return next(str(value) for value in groups)
    if len(groups) > FEW:
        return f"{len(groups)} different values, which are in {all_in}"
    runs = [run for run, _ in values]
    return "; ".join(
        f"{'not recorded' if value is None else value} ({_where(some, runs)})"
        for value, some in groups.items()
    )


def _where(some: Sequence[Planned], runs: Sequence[Planned]) -> str:
    """Describes some of the runs: all of some seeds, all of some cells, or a count."""
    seeds = sorted({run.seed for run in some})
    cells = list(dict.fromkeys(run.cell.name for run in some))
    if len(some) == sum(run.seed in seeds for run in runs):
        return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    if len(some) == sum(run.cell.name in cells for run in runs) and len(cells) <= FEW:
        return " and ".join(cells)
    return f"{len(some)} of {len(runs)} runs"


def table(records: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Returns header and rows of runs.csv: the provenance of every finished run."""
    rows = [record.columns() for record in records]
    header = list(dict.fromkeys(name for row in rows for name in row))
    return header, [[row.get(name) for name in header] for row in rows]
