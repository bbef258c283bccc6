"""The figures of `kl_in_practice`, from its two sweeps.

    python experiments studies.kl_in_practice.figures runs/kl_in_practice/language
    python experiments studies.kl_in_practice.figures runs/kl_in_practice/arithmetic

Writes figures.json and plots/frontier.png into the sweep's folder. For every choice at
every β it has means over seeds with 95% intervals:

    gold, kl, entropy    at the end of a run
    fall                 largest fall of gold below its previous best, gold units: a
                         measure of stability. It uses means of three evaluations; a
                         constant policy falls by about one standard error of one
    gradient             largest gradient norm of a step over the median of the run
    tokens               tokens sampled until gold passed half of the best mean gain of
                         the sweep, over the seeds that did
    lead                 gold at the last evaluation minus that of the seed's
                         unpenalised run at the same KL: the gain of the penalty over
                         early stopping
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from rlhf_jax.runs import folder, metrics, report
from rlhf_jax.sweeps import statistics
from studies import finished
from studies.finished import Finished
from studies.kl_in_practice import choices

Row = Mapping[str, Any]
MEASURED = ("gold", "kl", "entropy", "fall", "gradient", "tokens", "lead")
LAST = 5  # number of final steps over which the entropy is averaged
NONE = "none"  # the choice at β = 0
MARKERS = {"reward": "o", "loss": "s", "both": "^", "response": "*"}


# --- a run ------------------------------------------------------------------------


def measured(run: Finished, *, target: float, unpenalised: Finished | None) -> Row:
    """The figures of a run, None where a figure is undefined.

    Args:
      target: the gold score for `tokens_to`.
      unpenalised: the run of the same algorithm and seed with β = 0.
    """
    rows = metrics.read(run.folder / "metrics.jsonl")
    path = run.points()
    gold = np.convolve([row["gold"] for row in path], np.ones(3) / 3, mode="valid")
    norms = [row["policy/grad_norm"] for row in rows]
    finite = all(isinstance(norm, float) for norm in norms) and np.median(norms) > 0
    return {
        "gold": run.summary["policy"]["gold"],
        "kl": run.summary["policy"]["kl"],
        "entropy": float(np.mean([row["objective/entropy"] for row in rows[-LAST:]])),
        "fall": float(np.max(np.maximum.accumulate(gold) - gold, initial=0.0)),
        "gradient": float(max(norms) / np.median(norms)) if finite else None,
        "tokens": tokens_to(target, path, rows, batch_size=run.config["batch_size"]),
        "lead": None if unpenalised is None else lead(run, unpenalised),
    }


def tokens_to(
    target: float, path: Sequence[Row], rows: Sequence[Row], *, batch_size: int
) -> float | None:
    """Response tokens sampled before gold first reached the target.

    Args:
      path: rows with gold along training, by step.
      rows: rows of metrics.jsonl, with the mean response length of each step.

    Returns:
      None if gold never reached the target.
    """
    lengths = [row["response/length"] * batch_size for row in rows]
    for row in path:
        if row["gold"] >= target:
            return float(sum(lengths[: row["step"]]))
    return None


def lead(run: Finished, unpenalised: Finished) -> float | None:
    """Gold minus that of the unpenalised run when it first had the same KL.

    The unpenalised run is interpolated linearly in √KL between its rows.

    Returns:
      None if the unpenalised run never had this KL.
    """
    own, path = run.points()[-1], unpenalised.points()
    at = max(own["kl"], 0.0) ** 0.5
    before = path[0]
    for row in path[1:]:
        low, high = (max(point["kl"], 0.0) ** 0.5 for point in (before, row))
        if low <= at <= high:
            share = (at - low) / (high - low) if high > low else 0.0
            other = before["gold"] + share * (row["gold"] - before["gold"])
            return float(own["gold"] - other)
        before = row
    return None


# --- a sweep ----------------------------------------------------------------------


def summarise(runs: Sequence[Finished]) -> dict[str, Any]:
    """Computes the figures of a sweep.

    Returns:
      "target"; "cells": for each cell of the sweep its algorithm, choice, β, and the
      estimates of MEASURED with their values by seed.
    """
    free = {
        (algorithm_of(run), run.seed): run for run in runs if run.config["kl_coef"] == 0
    }
    gains = collections.defaultdict(list)
    for run in runs:
        gold = (run.summary[name]["gold"] for name in ("policy", "reference"))
        gains[run.cell].append(np.subtract(*gold))
    start = float(np.mean([run.summary["reference"]["gold"] for run in runs]))
    target = start + 0.5 * float(max(np.mean(of_cell) for of_cell in gains.values()))
    cells: dict[str, dict[str, Any]] = {}
    for run in runs:
        config = run.config
        of_cell = cells.setdefault(
            run.cell,
            {
                "algorithm": algorithm_of(run),
                "choice": choice_of(run),
                "kl_coef": config["kl_coef"],
                "by_seed": {name: {} for name in MEASURED},
            },
        )
        other = free.get((algorithm_of(run), run.seed))
        unpenalised = None if config["kl_coef"] == 0 else other
        for name, value in measured(
            run, target=target, unpenalised=unpenalised
        ).items():
            if value is not None:
                of_cell["by_seed"][name][str(run.seed)] = value
    for of_cell in cells.values():
        for name, by_seed in of_cell["by_seed"].items():
            values = list(by_seed.values())
            estimate = statistics.estimate(values) if values else None
            of_cell[name] = estimate and {
                "seeds": estimate.seeds,
                "mean": estimate.mean,
                "interval": estimate.interval and list(estimate.interval),
            }
    return {"target": target, "reference": start, "cells": cells}


def algorithm_of(run: Finished) -> str:
    """The algorithm's name in the sweep, where GRPO has RLOO's baseline."""
    return "ppo" if run.config["algorithm"] == "ppo" else "grpo"


def choice_of(run: Finished) -> str:
    """The name of the choice, as in "k1 reward"; `NONE` at β = 0."""
    if run.config["kl_coef"] == 0:
        return NONE
    penalty = run.config["penalty"]
    if penalty["per"] == "response":
        return choices.WEIGHTED
    forward = "forward " if penalty["direction"] == "forward" else ""
    return f"{forward}{penalty['value_estimator']} {penalty['placement']}"


def tell(figures: Row) -> None:
    """Prints the figures of `summarise` as two tables per algorithm."""
    cells = figures["cells"].values()
    for algorithm in dict.fromkeys(of["algorithm"] for of in cells):
        for names in (MEASURED[:3], MEASURED[3:]):
            report.table(
                f"{algorithm}: mean ± half of the 95% interval over seeds"
                + (f"; tokens to {figures['target']:.2f}" if "tokens" in names else ""),
                ("choice", "β", *names),
                [
                    (
                        of["choice"],
                        f"{of['kl_coef']:g}",
                        *(_cell(of[name]) for name in names),
                    )
                    for of in cells
                    if of["algorithm"] == algorithm
                ],
            )


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    spread = ""
    if row["interval"] is not None:
        spread = f" ±{(row['interval'][1] - row['interval'][0]) / 2:.2g}"
    return f"{row['mean']:.3g}{spread} ({row['seeds']})"


def draw(figures: Row, runs: Sequence[Finished]) -> Figure:
    """Plots gold against √KL, one panel per algorithm, and β = 0 along training."""
    cells = list(figures["cells"].values())
    algorithms = list(dict.fromkeys(of["algorithm"] for of in cells))
    choices = [c for c in dict.fromkeys(of["choice"] for of in cells) if c != NONE]
    colours = dict(
        zip(
            choices,
            colormaps["turbo"](np.linspace(0.03, 0.97, len(choices))),
            strict=True,
        )
    )
    figure = Figure(figsize=(6 * len(algorithms) + 2.4, 5), layout="constrained")
    axes = figure.subplots(1, len(algorithms), sharey=True, squeeze=False)[0]
    for axis, algorithm in zip(axes, algorithms, strict=True):
        for run in runs:
            if algorithm_of(run) == algorithm and run.config["kl_coef"] == 0:
                path = run.points()
                axis.plot(
                    [max(row["kl"], 0.0) ** 0.5 for row in path],
                    [row["gold"] for row in path],
                    color="0.75",
                    linewidth=1,
                    zorder=0,
                    label="β = 0 on its way" if run.seed == runs[0].seed else None,
                )
        for choice in choices:
            of_choice = sorted(
                (
                    of
                    for of in cells
                    if (of["algorithm"], of["choice"]) == (algorithm, choice)
                ),
                key=lambda of: of["kl_coef"],
            )
            if not of_choice:
                continue
            kl = [max(of["kl"]["mean"], 0.0) ** 0.5 for of in of_choice]
            gold = [of["gold"]["mean"] for of in of_choice]
            spread = np.array(
                [of["gold"]["interval"] or [of["gold"]["mean"]] * 2 for of in of_choice]
            ).T
            axis.errorbar(
                kl,
                gold,
                yerr=np.abs(spread - gold),
                fmt="--" if choice.startswith("forward") else "-",
                marker=MARKERS[choice.split()[-1]],
                color=colours[choice],
                linewidth=1.2,
                elinewidth=0.6,
                markersize=4,
                label=choice,
            )
        axis.set_title(algorithm.upper())
        axis.set_xlabel("√KL to the reference [√nat]")
        axis.axhline(figures["reference"], color="0.6", linewidth=0.8, linestyle=":")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("gold at the end")
    axes[-1].legend(
        frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    return figure


def main(options: finished.Options) -> None:
    """Prints and plots the figures of a sweep of choices."""
    runs = finished.runs_of(options.sweep)
    figures = summarise(runs)
    tell(figures)
    (options.sweep / "plots").mkdir(exist_ok=True)
    draw(figures, runs).savefig(options.sweep / "plots" / "frontier.png", dpi=130)
    folder.write_json(options.sweep / "figures.json", figures)
    print(f"figures.json and plots are in {options.sweep}")


if __name__ == "__main__":
    finished.command(main, description=__doc__)
