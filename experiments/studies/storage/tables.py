"""The tables and the plot of a finished sweep of `ablate_reference_storage`.

    python experiments studies.storage.tables runs/storage

Writes runs/storage/storage.json and runs/storage/storage.png, for one seed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import report
from rlhf_jax.runs.folder import write_json
from rlhf_jax.sweeps import planned, results

Row = dict[str, Any]


COST = {
    "held_mib": "held [MiB]",
    "host_mib": "host [MiB]",
    "peak_mib": "peak [MiB]",
    "tpu_peak_mib": "on a TPU [MiB]",
    "seconds": "seconds per batch",
}


ERROR = {
    "logprob_error": "|Δ log-prob| [nats per token]",
    "kl": "KL [nats per response]",
    "kl_error": "|Δ KL| [nats per response]",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Options of the tables."""

    sweep: tyro.conf.Positional[Path]
    """Folder of the sweep, the --out of `rlhf-jax sweep`."""
    seed: int = 0
    """Seed of the runs to show."""


def read(sweep: Path, *, seed: int) -> list[dict[str, Any]]:
    """The summaries of all storages, in the order of the sweep.

    Args:
      sweep: the folder of the sweep.
      seed: seed of the runs.

    Raises:
      InputError: the folder is not such a sweep's, or a run is not finished.
    """
    cells = _read(sweep / planned.BEGUN, has=("cells",))["cells"]
    files = [sweep / "runs" / cell / f"seed_{seed}" / "summary.json" for cell in cells]
    waiting = [file.parent for file in files if not file.exists()]
    if waiting:
        raise InputError(
            f"{sweep}: expected a run of seed {seed} that is done for every storage, "
            f"got none in {waiting[0]} ({len(waiting)} of {len(files)} lack one); run "
            f"the sweep, or give another --seed"
        )
    return [_read(file, has=("row", "held_out_loss")) for file in files]


def _read(file: Path, *, has: Sequence[str]) -> dict[str, Any]:
    """Reads a JSON object and checks that it has some fields."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        missing = [name for name in has if name not in fields]
    except (OSError, ValueError, TypeError) as error:
        got = str(error)
    else:
        if not missing:
            return fields
        got = f"one without {missing[0]}"
    raise InputError(
        f"{file}: expected a file of a sweep of ablate_reference_storage, got: {got}; "
        f"give the sweep's --out"
    )


def tell(rows: list[Row], *, loss: float) -> None:
    """Prints the costs and errors of the storages.

    Args:
      loss: loss of the reference on the held-out text, nats per token.
    """
    for title, columns in {
        "Cost of a reference's storage": COST,
        f"Error at a held-out loss of {loss:.3f} nats per token": ERROR,
    }.items():
        shown = [name for name in columns if any(row[name] is not None for row in rows)]
        report.table(
            title,
            ("storage", *(columns[name] for name in shown)),
            [(row["storage"], *(row[name] for name in shown)) for row in rows],
        )


def draw(rows: list[Row]) -> Figure:
    """Plots one panel per column of the table, with one bar per storage."""
    columns = ("held_mib", "peak_mib", "tpu_peak_mib", "logprob_error", "kl_error")
    shown = [name for name in columns if any(row[name] is not None for row in rows)]
    figure = Figure(figsize=(3 * len(shown), 3.6), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True)
    for axis, column in zip(axes, shown, strict=True):
        values = [row[column] for row in rows]
        bars = axis.barh(
            [row["storage"] for row in rows], [0.0 if v is None else v for v in values]
        )
        labels = ["—" if v is None else f"{v:.3g}" for v in values]
        axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.set_title((COST | ERROR)[column], fontsize=9)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    return figure


def main(options: Config) -> None:
    summaries = read(options.sweep, seed=options.seed)
    rows = [summary["row"] for summary in summaries]
    tell(rows, loss=summaries[0]["held_out_loss"])
    draw(rows).savefig(options.sweep / "storage.png", dpi=110)
    write_json(options.sweep / "storage.json", {"rows": rows})
    results.seal_again(options.sweep)
    print(f"the tables are in {options.sweep / 'storage.json'}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
