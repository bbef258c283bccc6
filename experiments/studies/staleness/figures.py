"""Frontiers of gold against KL for stale samplers, from their sweep.

    python experiments studies.staleness.figures runs/staleness

Writes figures.json and plots/frontier.png into the sweep's folder. For every sampler
and β they have the final gold, KL and fluency, as means over seeds with 95% intervals
and by seed. From metrics.jsonl come the largest staleness and the means, from step 5
on, of the mismatch to the sampler and of the weights' effective sample size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from rlhf_jax.runs import folder, metrics, report
from rlhf_jax.sweeps import statistics
from studies import finished
from studies.finished import Finished

MEASURED = ("gold", "kl", "fluency")
FROM = 5  # first step at which a sampler 4 behind has its full staleness
OF_SAMPLERS = ("policy/sampler_mismatch", "policy/sampler_ess")
ON_POLICY = "on-policy"


def sampler_of(run: Finished) -> str:
    """The name of a run's sampler, as in "4 behind, truncate"."""
    if not run.config["staleness"]:
        return ON_POLICY
    return f"{run.config['staleness']} behind, {run.config['correction']}"


def summarise(runs: Sequence[Finished]) -> list[dict[str, Any]]:
    """The sampler, β, metrics and estimates of MEASURED of each cell.

    Args:
      runs: finished runs, by cell.
    """
    cells: dict[str, list[Finished]] = {}
    for run in runs:
        cells.setdefault(run.cell, []).append(run)
    rows = []
    for of_cell in cells.values():
        steps = [
            step
            for run in of_cell
            for step in metrics.read(run.folder / "metrics.jsonl")
        ]
        oldest = (step.get("policy/staleness_max", 0.0) for step in steps)
        row: dict[str, Any] = {
            "sampler": sampler_of(of_cell[0]),
            "kl_coef": of_cell[0].config["kl_coef"],
            "staleness_max": max(oldest),
            "seeds": [run.seed for run in of_cell],
        }
        for name in OF_SAMPLERS:
            late = [s[name] for s in steps if s["step"] >= FROM and name in s]
            row[name] = float(np.mean(late)) if late else None
        for name in MEASURED:
            by_seed = {str(run.seed): run.summary["policy"][name] for run in of_cell}
            estimate = statistics.estimate([*by_seed.values()])
            row[name] = {
                "mean": estimate.mean,
                "interval": estimate.interval and list(estimate.interval),
                "by_seed": by_seed,
            }
        rows.append(row)
    return rows


def tell(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of `summarise` as a table."""
    report.table(
        "Mean ± half of the 95% interval over seeds",
        ("sampler", "β", *MEASURED),
        [
            (
                row["sampler"],
                f"{row['kl_coef']:g}",
                *(_shown(row[name]) for name in MEASURED),
            )
            for row in rows
        ],
    )


def _shown(estimate: dict[str, Any]) -> str:
    if estimate["interval"] is None:
        return f"{estimate['mean']:.3g}"
    low, high = estimate["interval"]
    return f"{estimate['mean']:.3g} ±{(high - low) / 2:.2g}"


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plots gold against √KL, with a line per sampler along β."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(samplers)))
    for sampler, colour in zip(samplers, colours, strict=True):
        of_sampler = sorted(
            (row for row in rows if row["sampler"] == sampler),
            key=lambda row: row["kl_coef"],
        )
        gold = [row["gold"]["mean"] for row in of_sampler]
        ends = [
            row["gold"]["interval"] or [row["gold"]["mean"]] * 2 for row in of_sampler
        ]
        axis.errorbar(
            [max(row["kl"]["mean"], 0.0) ** 0.5 for row in of_sampler],
            gold,
            yerr=np.abs(np.array(ends).T - gold),
            fmt="--" if "none" in sampler else "-",
            marker="o",
            markersize=4,
            color="black" if sampler == ON_POLICY else colour,
            elinewidth=0.6,
            label=sampler,
        )
    axis.set_xlabel("√KL to the reference [√nat]")
    axis.set_ylabel("gold at the end")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small")
    return figure


def main(options: finished.Options) -> None:
    """Prints and plots the figures of a sweep of samplers."""
    rows = summarise(finished.runs_of(options.sweep))
    tell(rows)
    (options.sweep / "plots").mkdir(exist_ok=True)
    draw(rows).savefig(options.sweep / "plots" / "frontier.png", dpi=130)
    folder.write_json(options.sweep / "figures.json", {"cells": rows})
    print(f"figures.json and plots are in {options.sweep}")


if __name__ == "__main__":
    finished.command(main, description=__doc__)
