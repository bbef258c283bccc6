"""Figures, tables and a plot of a comparison of algorithms.

A row describes one run or one n: "algorithm", "seed", "kl" [nats per response] and
MEASURED of `overoptimisation`; rows of best-of-n also have "n" and "kl_bound".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from rlhf_jax.runs import report
from studies.kl_frontier.overoptimisation import MEASURED

Floats = npt.NDArray[np.floating]
Row = Mapping[str, Any]
LABELS = {
    "reference": "reference",
    "ppo": "PPO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "dpo": "DPO",
    "best_of_n": "best of",
}
COLOURS = {
    "ppo": "tab:blue",
    "grpo": "tab:orange",
    "rloo": "tab:green",
    "dpo": "tab:red",
}


def label(row: Row) -> str:
    """The name of a row in tables and legends."""
    n = f" {row['n']}" if "n" in row else ""
    return LABELS[row["algorithm"]] + n


def summarise(
    points: Sequence[Row],
    before: Sequence[Row],
    after: Sequence[Row],
    *,
    kl_coef: float,
) -> dict[str, Any]:
    """Computes the figures of a comparison.

    Args:
      points: rows of the runs along training, with their "step".
      before: rows of the references, one per seed.
      after: rows of the finished runs, and of best-of-n for every n.
      kl_coef: β of the net objectives, reward units per nat.

    Returns:
      "reference": means over seeds. "policies": for each algorithm and each n, means
      over seeds and the values "of_seeds" of the measures, of the net objectives (gold
      or score minus β·KL) and of the lead in gold over best-of-n (`lead`). "paths": the
      means of each algorithm along training.
    """
    base = {row["seed"]: row for row in before}
    best = {
        seed: [row for row in after if "n" in row and row["seed"] == seed]
        for seed in base
    }
    names = ("kl", *MEASURED)
    policies: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(map(label, after)):
        rows = [row for row in after if label(row) == name]
        values = {key: [row[key] for row in rows] for key in names}
        for key in ("gold", "score"):
            values[f"net_{key}"] = [row[key] - kl_coef * row["kl"] for row in rows]
        values["lead"] = [
            lead(row, base[row["seed"]], best[row["seed"]]) for row in rows
        ]
        policies[name] = {
            **{
                key: None if None in of_seeds else float(np.mean(of_seeds))
                for key, of_seeds in values.items()
            },
            **{key: rows[0][key] for key in ("n", "kl_bound") if key in rows[0]},
            "of_seeds": values,
        }
    return {
        "num_seeds": len(base),
        "reference": _means(before, names),
        "policies": policies,
        "paths": {
            name: [
                {"step": step, **_means(rows, names)}
                for step, rows in _grouped(of_name, "step").items()
            ]
            for name, of_name in _grouped(points, "algorithm").items()
        },
    }


def lead(row: Row, reference: Row, best: Sequence[Row]) -> float | None:
    """Gold of a policy minus that of best-of-n at the same measured KL, gold units.

    Between its n, best-of-n is interpolated linearly in √KL.

    Args:
      row: row of the policy.
      reference: row of the reference with the same seed, at a KL of 0.
      best: rows of best-of-n with the same seed.

    Returns:
      None if the policy has a larger KL than the largest n.
    """
    curve = sorted((max(of["kl"], 0.0) ** 0.5, of["gold"]) for of in best)
    at = max(row["kl"], 0.0) ** 0.5
    if not curve or at > curve[-1][0]:
        return None
    distance, gold = np.array([(0.0, reference["gold"]), *curve]).T
    return float(row["gold"] - np.interp(at, distance, gold))


def tell(figures: Mapping[str, Any], *, kl_coef: float) -> None:
    """Prints the figures of `summarise` as tables."""
    rows = [
        ("reference", {name: [value] for name, value in figures["reference"].items()}),
        *((name, of["of_seeds"]) for name, of in figures["policies"].items()),
    ]
    report.table(
        "Responses to held-out prompts, mean ± deviation of "
        f"{figures['num_seeds']} seeds",
        ("", "KL [nats]", "gold", "score", "fluent", "distinct"),
        [(name, *(_cell(of[key]) for key in ("kl", *MEASURED))) for name, of in rows],
    )
    report.table(
        "Net objectives, and gold over that of best-of-n at the same KL",
        ("", f"gold - {kl_coef:g} KL", f"score - {kl_coef:g} KL", "lead in gold"),
        [
            (name, *(_cell(of[key]) for key in ("net_gold", "net_score", "lead")))
            for name, of in rows[1:]
        ],
    )
    bounds = [of for of in figures["policies"].values() if "n" in of]
    if bounds:
        report.table(
            "KL of best-of-n [nats]",
            ("n", "log n - (n - 1)/n", "measured"),
            [(of["n"], of["kl_bound"], _cell(of["of_seeds"]["kl"])) for of in bounds],
        )


def plot(
    folder: Path, points: Sequence[Row], before: Sequence[Row], after: Sequence[Row]
) -> None:
    """Draws folder/plots/comparison.png: gold and score against √KL.

    Args:
      points, before, after: as `summarise`.
    """
    (folder / "plots").mkdir(exist_ok=True)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("gold", "score"), strict=True):
        for algorithm, colour in COLOURS.items():
            runs = [
                _line(of_seed, name)
                for of_seed in _grouped(
                    [r for r in (*points, *after) if r["algorithm"] == algorithm],
                    "seed",
                ).values()
            ]
            if runs:
                for run in runs:
                    axis.plot(*run.T, color=colour, linewidth=0.6, alpha=0.6)
                    axis.plot(*run[-1], "o", color=colour, markersize=4)
                mean = np.mean(runs, axis=0)
                axis.plot(*mean.T, color=colour, linewidth=2, label=LABELS[algorithm])
        best = [row for row in after if "n" in row]
        for of_seed in _grouped(best, "seed").values():
            axis.plot(*_line(of_seed, name).T, "k+", markersize=5, alpha=0.6)
        bounds = [
            (of_n[0]["kl_bound"] ** 0.5, np.mean([row[name] for row in of_n]))
            for of_n in _grouped(best, "n").values()
        ]
        if bounds:
            axis.plot(
                *np.array(bounds).T,
                "k--",
                linewidth=1.5,
                label="best-of-n at its bound",
            )
        axis.plot(
            [0] * len(before), [row[name] for row in before], "s", color="0.5", zorder=0
        )
        axis.set_xlabel("d = √KL to the reference [√nat]")
        axis.set_ylabel(MEASURED[name])
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(
        frameon=False, fontsize="small", title="thin: a seed, bold: mean; +: measured"
    )
    figure.savefig(folder / "plots" / "comparison.png", dpi=150)


def _line(rows: Iterable[Row], name: str) -> Floats:
    return np.array([(max(row["kl"], 0.0) ** 0.5, row[name]) for row in rows])


def _grouped(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def _means(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in names}


def _cell(of_seeds: Sequence[float | None]) -> str:
    known = [value for value in of_seeds if value is not None]
    if len(known) < len(of_seeds):
        return "—"
    spread = f" ±{np.std(known):.2f}" if len(known) > 1 else ""
    return f"{np.mean(known):.2f}{spread}"
