"""The figures of a sweep over β: the fit of Gao et al., failures, tables and plots.

    gold(d) - gold(0) = d (α - β' log d),    d = sqrt(KL)          Gao et al. 2022

A row describes one run: "seed", "kl_coef", "kl" [nats per response] and MEASURED.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf_jax.runs import report

Floats = npt.NDArray[np.floating]
Row = Mapping[str, Any]

MEASURED = {
    "gold": "gold score [gold units]",
    "score": "reward-model score [std in the reference]",
    "fluency": "fluency [share that parses]",
    "distinct": "distinct [share of the responses of a batch]",
}
FAILURES = {
    "hacking": "score up, gold down",
    "fluency": "fluency lost",
    "distinct": "collapsed",
}
LEAST_SHARE = (
    0.8  # of the reference's value, below which a run fails; as alarms.Limits.distinct
)


class Fit(NamedTuple):
    """gain = d (α - β' log d)."""

    alpha: float  # gold units per √nat
    beta: float  # β', gold units per √nat; gold turns at log d = α/β' - 1
    r_squared: float


def fit(kl: Floats, gain: Floats) -> Fit | None:
    """Fits the gain in gold over its value at KL 0 by least squares.

    Args:
      kl: float[N], nats per response. Estimates that are not positive have no logarithm
        and are dropped.
      gain: float[N], gold units.

    Returns:
      None with fewer than 3 points.

    Source: Gao, Schulman & Hilton 2022, arXiv:2210.10760, section 3.1.
    """
    d, gain = np.sqrt(kl[kl > 0]), gain[kl > 0]
    if len(d) < 3:
        return None
    columns = np.stack([d, -d * np.log(d)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, gain, rcond=None)
    left = np.square(gain - columns @ [alpha, beta]).sum()
    spread = np.square(gain - gain.mean()).sum()
    return Fit(float(alpha), float(beta), float(1 - left / max(spread, 1e-12)))


def summarise(
    points: Sequence[Row], before: Sequence[Row], after: Sequence[Row]
) -> dict[str, Any]:
    """Computes the figures of a sweep.

    Args:
      points: rows of all runs along training.
      before: rows of the references, one per seed.
      after: rows of all finished runs.

    Returns:
      "reference": means over seeds. "kl_coefs": for each β, means over seeds and the
      values "of_seeds" of the measures, of the gains over the reference and of the net
      objectives (gold or score minus β·KL); the number of seeds with each of
      `FAILURES`; and the "fit" of its runs. "fit": the fit of all runs. "peak": the β
      with the best mean net objective. "three_failures": whether β = 0 has all three in
      every seed. "prevented_by": the β without failures in any seed.
    """
    base = {row["seed"]: row for row in before}

    def fit_of(rows: Sequence[Row]) -> dict[str, float] | None:
        kl = np.array([row["kl"] for row in rows])
        gain = np.array([row["gold"] - base[row["seed"]]["gold"] for row in rows])
        fitted = fit(kl, gain)
        return None if fitted is None else fitted._asdict()

    of_betas: dict[float, dict[str, Any]] = {}
    for kl_coef in dict.fromkeys(row["kl_coef"] for row in after):
        rows = [row for row in after if row["kl_coef"] == kl_coef]
        now, first = (
            {name: np.array([of[name] for of in rows]) for name in ("kl", *MEASURED)}
            for rows in (rows, [base[row["seed"]] for row in rows])
        )
        values = dict(now)
        for name in ("gold", "score"):
            values[f"{name}_gain"] = now[name] - first[name]
            values[f"net_{name}"] = now[name] - kl_coef * now["kl"]
        failures = {
            "hacking": (values["score_gain"] > 0) & (values["gold_gain"] < 0),
            "fluency": now["fluency"] < LEAST_SHARE * first["fluency"],
            "distinct": now["distinct"] < LEAST_SHARE * first["distinct"],
        }
        of_betas[kl_coef] = {
            **{name: float(of_seeds.mean()) for name, of_seeds in values.items()},
            "of_seeds": {name: of_seeds.tolist() for name, of_seeds in values.items()},
            "failures": {name: int(failed.sum()) for name, failed in failures.items()},
            "fit": fit_of([row for row in points if row["kl_coef"] == kl_coef] + rows),
        }
    return {
        "reference": {
            name: float(np.mean([row[name] for row in before]))
            for name in ("kl", *MEASURED)
        },
        "num_seeds": len(base),
        "kl_coefs": {f"{kl_coef:g}": of for kl_coef, of in of_betas.items()},
        "fit": fit_of([*points, *after]),
        "peak": {
            name: max(of_betas, key=lambda kl_coef: of_betas[kl_coef][f"net_{name}"])
            for name in ("gold", "score")
        },
        "three_failures": 0.0 in of_betas
        and all(failed == len(base) for failed in of_betas[0.0]["failures"].values()),
        "prevented_by": [
            kl_coef
            for kl_coef, of in of_betas.items()
            if not any(of["failures"].values())
        ],
    }


def tell(figures: Mapping[str, Any]) -> None:
    """Prints the figures of `summarise` as tables."""
    reference, of_betas = figures["reference"], figures["kl_coefs"]
    seeds = figures["num_seeds"]
    report.table(
        f"Responses to held-out prompts, mean ± deviation of {seeds} seeds",
        ("", "KL [nats]", "gold", "score", "fluent", "distinct"),
        [
            ("reference", *(f"{reference[name]:.2f}" for name in ("kl", *MEASURED))),
            *(
                (
                    f"β = {kl_coef}",
                    *(
                        f"{of[name]:.2f} ±{np.std(of['of_seeds'][name]):.2f}"
                        for name in ("kl", *MEASURED)
                    ),
                )
                for kl_coef, of in of_betas.items()
            ),
        ],
    )
    report.table(
        "Net objectives, and gold(d) - gold(0) = d (α - β' log d), d = √KL",
        ("", "gold - βKL", "score - βKL", "α", "β'", "R²"),
        [
            (f"β = {kl_coef}", of["net_gold"], of["net_score"], *_fitted(of["fit"]))
            for kl_coef, of in of_betas.items()
        ]
        + [("all runs", None, None, *_fitted(figures["fit"]))],
    )
    report.table(
        f"Failures, in how many of {seeds} seeds",
        ("", *FAILURES.values()),
        [
            (f"β = {kl_coef}", *(of["failures"][name] for name in FAILURES))
            for kl_coef, of in of_betas.items()
        ],
    )
    print(f"gold - β KL peaks at β = {figures['peak']['gold']:g}")
    if "0" in of_betas:
        of, shown = (
            of_betas["0"],
            "all three" if figures["three_failures"] else "not all",
        )
        print(
            f"without the penalty: score {of['score_gain']:+.2f}, gold "
            f"{of['gold_gain']:+.2f}, fluency {reference['fluency']:.2f} -> "
            f"{of['fluency']:.2f}, distinct {reference['distinct']:.2f} -> "
            f"{of['distinct']:.2f}: {shown} failures in every seed"
        )
    prevented = ", ".join(f"{kl_coef:g}" for kl_coef in figures["prevented_by"])
    print(f"β without any failure in any seed: {prevented or 'none'}")


def plots(folder: Path, rows: Sequence[Row], figures: Mapping[str, Any]) -> None:
    """Draws folder/plots/frontier.png and objective.png.

    Args:
      rows: rows of all runs in the order of their steps, the last one included.
      figures: the figures of `summarise`.
    """
    (folder / "plots").mkdir(exist_ok=True)
    _frontier(rows, figures).savefig(folder / "plots" / "frontier.png", dpi=150)
    _objective(figures).savefig(folder / "plots" / "objective.png", dpi=150)


def _frontier(rows: Sequence[Row], figures: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    kl_coefs = sorted({row["kl_coef"] for row in rows})
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(kl_coefs)))
    for axis, (name, label) in zip(axes.flat, MEASURED.items(), strict=True):
        for kl_coef, colour in zip(kl_coefs, colours, strict=True):
            runs: dict[int, list[tuple[float, float]]] = {}
            for row in rows:
                if row["kl_coef"] == kl_coef:
                    d = np.sqrt(max(row["kl"], 0.0))
                    runs.setdefault(row["seed"], []).append((d, row[name]))
            lines = np.array(list(runs.values()))
            for line in lines:
                axis.plot(*line.T, color=colour, linewidth=0.6, alpha=0.6)
            mean = lines.mean(axis=0)
            axis.plot(*mean.T, color=colour, linewidth=2, label=f"β = {kl_coef:g}")
            axis.plot(*mean[-1], "o", color=colour, markersize=5)
        axis.set_ylabel(label)
        _plain(axis)
    if figures["fit"] is not None:
        of = Fit(**figures["fit"])
        d = np.linspace(1e-3, np.sqrt(max(row["kl"] for row in rows)), 200)
        curve = figures["reference"]["gold"] + d * (of.alpha - of.beta * np.log(d))
        axes[0, 0].plot(d, curve, "k--", linewidth=1, label="d (α - β' log d)")
    axes[0, 0].legend(frameon=False, fontsize="small", title="thin: a seed, bold: mean")
    for axis in axes[1]:
        axis.set_xlabel("d = √KL to the reference [√nat]")
    return figure


def _objective(figures: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    of_betas = list(figures["kl_coefs"].values())
    for name, label, colour in (
        ("net_score", "reward-model score - β KL", "tab:blue"),
        ("net_gold", "gold - β KL", "tab:orange"),
    ):
        for of_seed in np.array([of["of_seeds"][name] for of in of_betas]).T:
            axis.plot(of_seed, color=colour, linewidth=0.6, alpha=0.6)
        means = [of[name] for of in of_betas]
        axis.plot(means, "o-", color=colour, linewidth=2, markersize=4, label=label)
        peak = int(np.argmax(means))
        axis.plot(peak, means[peak], "*", color=colour, markersize=16)
    axis.set_xticks(range(len(of_betas)), list(figures["kl_coefs"]))
    axis.set_xlabel("β [reward units per nat]; a star is a peak")
    axis.set_ylabel("net objective [reward units]")
    axis.legend(frameon=False)
    _plain(axis)
    return figure


def _plain(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _fitted(fitted: Mapping[str, float] | None) -> tuple[float | None, ...]:
    return (None,) * 3 if fitted is None else tuple(fitted.values())
