"""The finished runs of a sweep, and the command line of programs that plot them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, metrics
from rlhf_jax.sweeps import results

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a program that makes figures."""

    sweep: tyro.conf.Positional[Path]
    """Folder of the sweep, the --out of `rlhf-jax sweep`."""


def command(main: Callable[[Options], None], *, description: str | None) -> None:
    """Runs a program that makes figures of a sweep, and seals the sweep's folder."""
    try:
        options = tyro.cli(Options, description=description)
        main(options)
        results.seal_again(options.sweep)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class Finished(NamedTuple):
    """A finished run."""

    cell: str  # name of the cell, as in "kl_coef=0.05"
    seed: int
    config: Row
    summary: Row
    folder: Path

    def points(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl that describe whole batches, in their order."""
        return [
            row
            for row in metrics.read(self.folder / "samples.jsonl")
            if "tokens" not in row
        ]


def runs_of(sweep: Path) -> list[Finished]:
    """Returns the finished runs, by cell in the order of the sweep and then by seed.

    Args:
      sweep: the folder of `rlhf-jax sweep --out`.

    Raises:
      InputError: the folder is not a sweep's, or no run is finished.
    """
    begun = sweep / "sweep.json"
    if not begun.exists():
        raise InputError(
            f"{sweep}: expected the folder of a sweep, got one without sweep.json; "
            f"give the --out of rlhf-jax sweep"
        )
    cells = _read(begun)["cells"]
    runs = [
        Finished(
            cell=cell,
            seed=int(place.name.removeprefix("seed_")),
            config=folder.read_config(place / folder.CONFIG),
            summary=_read(place / "summary.json"),
            folder=place,
        )
        for cell in cells
        for place in sorted(
            (sweep / "runs" / cell).glob("seed_*"),
            key=lambda path: int(path.name.removeprefix("seed_")),
        )
        if (place / "summary.json").exists()
    ]
    if not runs:
        raise InputError(
            f"{sweep}: expected runs that are done, got none; start the sweep first"
        )
    return runs


def complete(runs: Sequence[Finished]) -> list[Finished]:
    """Returns the runs of the seeds that every cell has, and prints the other seeds.

    Raises:
      InputError: the cells have no seed in common.
    """
    of_cells: dict[str, set[int]] = {}
    for run in runs:
        of_cells.setdefault(run.cell, set()).add(run.seed)
    common = set.intersection(*of_cells.values())
    left_out = sorted(set.union(*of_cells.values()) - common)
    if not common:
        raise InputError(
            "expected a seed of which every cell is done, got none; go on with the "
            "sweep first"
        )
    if left_out:
        print(f"not every cell has seeds {', '.join(map(str, left_out))}: left out")
    return [run for run in runs if run.seed in common]


def check_apart(runs: Sequence[Finished], *, option: str) -> None:
    """Checks that cells differ in an option, which the figures label them by.

    Raises:
      InputError: two cells have the same value.
    """
    values = {run.cell: run.config[option] for run in runs}
    if len(set(values.values())) < len(values):
        raise InputError(
            f"expected cells that differ in {option}, got {', '.join(values):.200}; "
            f"results.json has the figures of every cell"
        )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
