"""The tables and the picture of a sweep of `ablate_reference_storage` that is done.

    python experiments studies.storage.tables runs/storage

They go to runs/storage/storage.json and runs/storage/storage.png, of one seed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import report
from rlhf_jax.runs.folder import write_json
from rlhf_jax.sweeps import planned

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
    """Which sweep."""

    sweep: tyro.conf.Positional[Path]
    """Folder of the sweep."""
    seed: int = 0
    """Whose rows are shown."""


def read(sweep: Path, *, seed: int) -> list[dict[str, Any]]:
    """The summaries of all storages, in the order of the sweep.

    Args:
      sweep: its folder.
      seed: of the runs.

    Raises:
      InputError: it is no such sweep, or a run is not done.
    """
    try:
        begun = json.loads((sweep / planned.BEGUN).read_text(encoding="utf-8"))
        places = [sweep / "runs" / cell / f"seed_{seed}" for cell in begun["cells"]]
        waiting = [place for place in places if not (place / "summary.json").exists()]
        if not waiting:
            summaries = [
                json.loads((place / "summary.json").read_text(encoding="utf-8"))
                for place in places
            ]
            assert all("storage" in summary["row"] for summary in summaries)
            return summaries
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise InputError(
            f"{sweep}: expected the folder of a sweep of ablate_reference_storage, "
            f"got {type(error).__name__}: {error}; give the sweep's --out"
        ) from error
    raise InputError(
        f"{sweep}: expected a run of seed {seed} that is done for every storage, got "
        f"none in {waiting[0]} ({len(waiting)} of {len(places)} lack one); run the "
        f"sweep, or give another --seed"
    )


def tell(rows: list[Row], *, loss: float) -> None:
    """Prints what the storages cost and how far they are off.

    Args:
      loss: of the reference on the held-out text, nats per token.
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
    """A panel a column of the table, a bar a storage."""
    wanted = ("held_mib", "peak_mib", "tpu_peak_mib", "logprob_error", "kl_error")
    shown = [name for name in wanted if any(row[name] is not None for row in rows)]
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
    print(f"the tables are in {options.sweep / 'storage.json'}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
