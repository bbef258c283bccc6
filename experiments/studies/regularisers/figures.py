"""The figures of `regularisers`, from a finished sweep.

    python experiments studies.regularisers.figures runs/regularisers/language

Writes figures.json and plots/frontier.png into the sweep's folder. They have means over
seeds with 95% intervals for every cell when the proxy score first reaches the target,
halfway between the reference's score and that of the run without a KL:

    gold       score of the careful judge, or of the verifier on held-out sums
    kl         KL to the first reference, nats per response
    entropy    nats per token
    distinct   share of the responses of a batch that are not in an earlier row
    step       iterations until then

and the same at the end, with the final proxy score. Proxy, gold and KL are measured on
held-out prompts (the proxy of sums on the batch), averaged over three evaluations and
interpolated linearly. `held.PUBLISHED` is answered over the seeds in which both cells
reach the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rlhf_jax.runs import folder, metrics, report
from rlhf_jax.sweeps import claims, statistics
from studies import finished
from studies.finished import Finished
from studies.regularisers.held import NAMES, NONE, PUBLISHED

Row = Mapping[str, Any]
MEASURED = ("gold", "kl", "entropy", "distinct", "step")
AT_END = ("score", *MEASURED[:-1])
LOOKS = 3  # number of evaluations in a moving average


def way(run: Finished) -> list[dict[str, float]]:
    """Moving averages over LOOKS evaluations of the score and of MEASURED."""
    by_step = {row["step"]: row for row in metrics.read(run.folder / "metrics.jsonl")}
    rows = []
    for point in run.points():
        of_batch = by_step[point["step"]]
        rows.append(
            {
                "score": point.get("score", of_batch["objective/scores"]),
                "gold": point["gold"],
                "kl": point["kl"],
                "entropy": of_batch["objective/entropy"],
                "distinct": of_batch["response/distinct_fraction"],
                "step": float(point["step"]),
            }
        )
    return [
        {
            name: float(np.mean([row[name] for row in rows[at : at + LOOKS]]))
            for name in rows[0]
        }
        for at in range(len(rows) - LOOKS + 1)
    ]


def passage(rows: Sequence[Row], *, target: float) -> dict[str, float] | None:
    """MEASURED when the score first reaches the target, interpolated linearly.

    Returns:
      None if the score never reaches it.
    """
    before = rows[0]
    for row in rows:
        if row["score"] >= target:
            rise = row["score"] - before["score"]
            share = (target - before["score"]) / rise if rise > 0 else 1.0
            return {
                name: float(before[name] + share * (row[name] - before[name]))
                for name in MEASURED
            }
        before = row
    return None


def summarise(runs: Sequence[Finished]) -> dict[str, Any]:
    """Computes the figures of a sweep.

    Returns:
      "target", a score; "cells": the measures of each at the target and at the end;
      "claims": the answers to the published claims.
    """
    ways = {(label_of(run), run.seed): way(run) for run in runs}
    free = [rows for (label, _), rows in ways.items() if label == NONE]
    start = float(np.mean([rows[0]["score"] for rows in ways.values()]))
    top = float(np.mean([rows[-1]["score"] for rows in free]))
    target = start + 0.5 * (top - start)
    cells: dict[str, Any] = {}
    for (label, seed), rows in ways.items():
        at_end = {name: rows[-1][name] for name in AT_END}
        places = {"target": passage(rows, target=target), "end": at_end}
        cell = cells.setdefault(label, {place: {} for place in places})
        for place, measured in places.items():
            for name, value in (measured or {}).items():
                cell[place].setdefault(name, {})[str(seed)] = value
    answers = answered(cells)
    for cell in cells.values():
        for place, of_place in cell.items():
            cell[place] = {name: estimate(of) for name, of in of_place.items()}
    return {"target": target, "reference": start, "cells": cells, "claims": answers}


def answered(cells: Row) -> list[dict[str, Any]]:
    """Answers the published claims, over the seeds in which both cells have a value.

    Measures named last_gold and so on are those at the end.
    """

    def lookup(measure: str, settings: Row) -> dict[int, float]:
        at_end = measure.startswith("last_")
        cell = cells.get(str(settings["held"]), {})  # empty without a finished run
        place = cell.get("end" if at_end else "target", {})
        by_seed = place.get(measure.removeprefix("last_"), {})
        return {int(seed): value for seed, value in by_seed.items()}

    rows = []
    for one in PUBLISHED:
        answer = claims.answer(one.claim, lookup=lookup)
        rows.append({**one._asdict(), **answer._asdict(), "claim": one.claim})
    return rows


def label_of(run: Finished) -> str:
    """The label of a run's cell, "kl" in "held=kl"."""
    return run.cell.partition("=")[2]


def estimate(by_seed: Mapping[str, float]) -> dict[str, Any]:
    """The mean over seeds, its 95% interval, and the seeds."""
    of_seeds = statistics.estimate(list(by_seed.values()))
    interval = of_seeds.interval and list(of_seeds.interval)
    return {"mean": of_seeds.mean, "interval": interval, "by_seed": dict(by_seed)}


def table(figures: Row, *, place: str) -> list[tuple[str, ...]]:
    """The rows of the table of one place, "target" or "end"."""
    names = MEASURED if place == "target" else AT_END
    rows = []
    for label, cell in figures["cells"].items():
        seeds = len(cell[place].get("gold", {}).get("by_seed", {}))
        shown = (_shown(cell[place].get(name)) for name in names)
        rows.append((NAMES[label], str(seeds), *shown))
    return rows


def _shown(row: Row | None) -> str:
    if row is None:
        return "–"
    text = f"{row['mean']:.2f}"
    if row["interval"] is not None:
        text += f" ± {(row['interval'][1] - row['interval'][0]) / 2:.2f}"
    return text.replace("-", "−")


def draw(runs: Sequence[Finished]) -> Figure:
    """Plots gold against the proxy score along training, means over seeds."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    ways: dict[str, list[Any]] = {}
    for run in runs:
        ways.setdefault(label_of(run), []).append(way(run))
    for number, (label, of_seeds) in enumerate(ways.items()):
        mean = {
            name: np.mean([[row[name] for row in rows] for rows in of_seeds], axis=0)
            for name in ("score", "gold")
        }
        axis.plot(
            mean["score"],
            mean["gold"],
            color="0.4" if label == NONE else f"C{number}",
            linewidth=1.3,
            marker="o",
            markersize=2.5,
            label=NAMES[label],
        )
    axis.set_xlabel("proxy score")
    axis.set_ylabel("gold")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="x-small")
    return figure


def main(options: finished.Options) -> None:
    """Prints and plots the figures of a sweep of regularisers."""
    runs = finished.runs_of(options.sweep)
    figures = summarise(runs)
    title = f"where the proxy score is {figures['target']:.2f}"
    for place, names, where in (
        ("target", MEASURED, title),
        ("end", AT_END, "at the end"),
    ):
        report.table(where, ("", "seeds", *names), table(figures, place=place))
    report.table(
        "published claims",
        ("claim", "answer", "difference", "seeds"),
        [
            (
                f"{row['says']} ({row['source']})",
                row["answer"],
                "–" if row["difference"] is None else f"{row['difference']:.3f}",
                row["seeds"],
            )
            for row in figures["claims"]
        ],
    )
    (options.sweep / "plots").mkdir(exist_ok=True)
    draw(runs).savefig(options.sweep / "plots" / "frontier.png", dpi=110)
    folder.write_json(options.sweep / "figures.json", figures)
    print(f"figures.json and plots are in {options.sweep}")


if __name__ == "__main__":
    finished.command(main, description=__doc__)
