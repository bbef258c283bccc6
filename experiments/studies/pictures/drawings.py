"""Tables and plots of `kl_pictures.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.runs import report

Row = dict[str, Any]
REFERENCE_WORDS = (0.35, 0.30, 0.20, 0.10, 0.04, 0.01)
POLICY_WORDS = {
    "close": (0.33, 0.32, 0.18, 0.12, 0.04, 0.01),
    "moved": (0.15, 0.15, 0.40, 0.20, 0.08, 0.02),
    "elsewhere": (0.02, 0.02, 0.05, 0.01, 0.40, 0.50),
}
PER_TOKEN = {name: Penalty(name) for name in ("k1", "k2", "k3", "exact")}
PER_RESPONSE = {f"{name} of Σ": Penalty(name, per="response") for name in ("k2", "k3")}
ESTIMATORS = PER_TOKEN | PER_RESPONSE


def tables(summary: Mapping[str, Any]) -> None:
    """Prints the tables of the three pictures."""
    words = summary["six_words"]
    report.table(
        "1. KL over six tokens, nats: π log(π/π_ref) of each, and their sum",
        ("policy", *(f"{word:g}" for word in REFERENCE_WORDS), "KL"),
        [
            (name, *(f"{part:.4f}" for part in (*row["contributions"], row["kl"])))
            for name, row in words.items()
        ],
    )
    report.table(
        "2. KL of a response, nats: mean ± standard deviation over responses",
        ("tokens", *ESTIMATORS),
        [
            (
                row["length"],
                *(
                    f"{row[f'{name} mean']:.3f} ± {row[f'{name} std']:.3f}"
                    for name in ESTIMATORS
                ),
            )
            for row in summary["estimators"]
        ],
    )
    report.table(
        "3. Exact KL of a response behind a prefix, nats: mean ± its standard error",
        ("prefix", "words", "log π_ref", "same responses", "own responses"),
        [
            (
                row["prefix"],
                row["words"] or "—",
                row["ref_logprob"],
                f"{row['kl_same']:.3f} ± {row['kl_same_error']:.3f}",
                f"{row['kl_own']:.3f} ± {row['kl_own_error']:.3f}",
            )
            for row in summary["prefixes"]
        ],
    )


def plots(folder: Path, summary: Mapping[str, Any]) -> None:
    """Draws folder/plots/six_words.png, estimators.png and prefixes.png."""
    (folder / "plots").mkdir(exist_ok=True)
    for name, draw in (
        ("six_words", _draw_words),
        ("estimators", _draw_estimators),
        ("prefixes", _draw_prefixes),
    ):
        drawn = draw(summary[name])
        drawn.savefig(folder / "plots" / f"{name}.png", dpi=150)


def _draw_words(policies: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, len(policies), sharex=True, sharey="row")
    places = np.arange(len(REFERENCE_WORDS))
    for (name, row), (above, below) in zip(policies.items(), axes.T, strict=True):
        above.bar(places - 0.2, REFERENCE_WORDS, 0.4, color="0.7", label="reference")
        above.bar(places + 0.2, row["policy"], 0.4, color="tab:blue", label="policy")
        above.set_title(f"{name}: KL {row['kl']:.4f} nats")
        parts = np.array(row["contributions"])
        colours = np.where(parts > 0, "tab:red", "tab:green")
        below.bar(places, parts, 0.6, color=colours)
        below.axhline(0, color="black", linewidth=0.8)
        below.set_xticks(
            places, [f"token {place + 1}" for place in places], rotation=60
        )
        _plain(above)
        _plain(below)
    axes[0, 0].set_ylabel("probability")
    axes[1, 0].set_ylabel("π log(π/π_ref) [nats]")
    axes[0, 0].legend(frameon=False)
    return figure


def _draw_estimators(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    spread, relative = figure.subplots(1, 2, sharex=True)
    lengths = [row["length"] for row in rows]
    for name in ESTIMATORS:
        style = "--" if name in PER_RESPONSE else "-"
        stds = np.array([row[f"{name} std"] for row in rows])
        means = np.array([row[f"{name} mean"] for row in rows])
        exact = np.array([row["exact mean"] for row in rows])
        # The exact KL of one token depends only on the prompt, which never changes.
        varies = stds > 1e-6
        (line,) = spread.plot(
            np.array(lengths)[varies],
            stds[varies],
            f"o{style}",
            markersize=3,
            label=name,
        )
        relative.plot(
            lengths, means / exact, f"o{style}", markersize=3, color=line.get_color()
        )
    spread.set_xscale("log", base=2)
    spread.set_yscale("log")
    spread.set_ylabel("standard deviation [nats]")
    relative.set_ylabel("mean, over the mean of exact")
    for axis in (spread, relative):
        axis.set_xlabel("tokens of a response")
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        _plain(axis)
    spread.legend(frameon=False, fontsize="small")
    return figure


def _draw_prefixes(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(rows))
    for shift, which, label in ((-0.2, "same", "same"), (0.2, "own", "own")):
        axis.bar(
            places + shift,
            [row[f"kl_{which}"] for row in rows],
            0.4,
            yerr=[row[f"kl_{which}_error"] for row in rows],
            label=f"{label} responses",
        )
    names = [
        f"{row['prefix']}\nlog π_ref {row['ref_logprob']:.0f}"
        if row["words"]
        else "none"
        for row in rows
    ]
    axis.set_xticks(places, names)
    axis.set_ylabel("exact KL of a response [nats]")
    axis.legend(frameon=False)
    _plain(axis)
    return figure


def _plain(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
