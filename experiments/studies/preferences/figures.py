"""The table, the frontier and sample responses of the study of preferences.

    python experiments studies.preferences.figures runs/preferences --shown 6 11 22 27

Writes figures.json, table.md and plots/frontier.png into the study's folder: the scores
of proxy and judge for every policy and best-of-n against the root of the KL, and
perplexity, diversity and forgetting, with 95% intervals over seeds. texts.md has the
greedy responses of all policies to the prompts of --shown, side by side. Some prompts
are unpleasant: choose the prompts from data/held_out_prompts.jsonl before you read any
response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from studies.preferences import frontier, results
from studies.preferences.evaluation import PROXY, REFERENCE
from studies.preferences.frontier import MEASURED, Row

COLUMNS = {  # {measure: (heading in the table, decimals)}
    "kl": ("KL", 2),
    "proxy_gain": ("proxy over the reference", 2),
    "judge_gain": ("judge over the reference", 2),
    "perplexity": ("perplexity", 2),
    "distinct": ("distinct", 2),
    "length": ("length", 1),
    "shakespeare": ("forgetting, Shakespeare", 3),
    "gsm8k": ("forgetting, GSM8K", 3),
}
BEST = "best of"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    study: tyro.conf.Positional[Path]
    """Folder of the study, the --out of its preparation."""
    shown: tuple[int, ...] = ()
    """Rows of data/held_out_prompts.jsonl, from 0, whose responses texts.md shows."""


def table(summary: Mapping[str, Any]) -> str:
    """A Markdown table of means over seeds and their intervals."""
    lines = [
        "| | " + " | ".join(heading for heading, _ in COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, measured in summary.items():
        cells = [
            _cell(measured[key], decimals) for key, (_, decimals) in COLUMNS.items()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(estimate: Row | None, decimals: int) -> str:
    if estimate is None:
        return ""
    mean = f"{estimate['mean']:.{decimals}f}"
    if estimate["interval"] is None:
        return mean
    low, high = (f"{end:.{decimals}f}" for end in estimate["interval"])
    return f"{mean} ({low} to {high})"


def draw(summary: Mapping[str, Any]) -> Figure:
    """Plots each of MEASURED against √KL, with intervals over seeds."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    axes = figure.subplots(2, 4).ravel()
    trained = [n for n in summary if n != REFERENCE and not n.startswith(BEST)]
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, max(len(trained), 1)))
    best = [n for n in summary if n.startswith(BEST)]
    measured = [name for name in MEASURED if name != "kl"]
    for axis, key in zip(axes, measured, strict=False):
        for name, colour in zip(trained, colours, strict=True):
            at, mean, ends = _point(summary[name], key)
            marker = "s" if name.startswith("dpo") else "o"
            axis.errorbar(
                [at], [mean], yerr=ends, fmt=marker, color=colour, capsize=2, label=name
            )
        points = [_point(summary[n], key) for n in best if summary[n][key] is not None]
        if points:
            line = np.array([(at, mean) for at, mean, _ in points])
            axis.plot(*line.T, "k--+", linewidth=1, label="best-of-n at its bound")
        if summary[REFERENCE][key] is not None:
            mean = summary[REFERENCE][key]["mean"]
            axis.axhline(mean, color="0.6", linewidth=0.8, label=REFERENCE)
        axis.set_title(MEASURED[key], fontsize="small")
        axis.set_xlim(left=0)
        axis.set_xlabel("√KL to the reference [√nat]", fontsize="small")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    # Both reward models have the same scale.
    limits = np.array([axis.get_ylim() for axis in axes[:2]])
    for axis in axes[:2]:
        axis.set_ylim(limits.min(), limits.max())
    handles, labels = axes[0].get_legend_handles_labels()
    axes[-1].axis("off")
    axes[-1].legend(handles, labels, frameon=False, fontsize="small", loc="center")
    return figure


def _point(measured: Mapping[str, Any], key: str) -> tuple[float, float, Any]:
    """√KL, the mean, and the distances from it to the ends of its interval."""
    estimate = measured[key]
    low, high = estimate["interval"] or [estimate["mean"]] * 2
    ends = np.array([[estimate["mean"] - low], [high - estimate["mean"]]])
    return max(measured["kl"]["mean"], 0.0) ** 0.5, estimate["mean"], ends


def side_by_side(evaluated: Sequence[Row], *, shown: Sequence[int]) -> str:
    """A Markdown text of the greedy responses of each policy's first seed.

    Args:
      evaluated: the result of `results.read`.
      shown: rows of the held-out prompts.
    """
    first: dict[str, Row] = {}
    for one in evaluated:
        first.setdefault(one["policy"], one)
    parts = []
    for number in shown:
        responses = {
            name: row
            for name, one in first.items()
            for row in one[PROXY]["samples"]
            if (row["model"], row["decoding"]) == ("policy", "greedy")
            and row["row"] == number
        }
        if not responses:
            raise InputError(
                f"--shown {number}: expected a row of the held-out prompts, got one "
                f"that was not evaluated; name another"
            )
        asked = next(iter(responses.values()))["prompt"]
        turns = [f"> **{turn['role']}**: {_plain(turn['content'])}" for turn in asked]
        lines = [f"| {n} | {_plain(row['response'])} |" for n, row in responses.items()]
        head = ["| policy | likeliest response |", "|---|---|"]
        parts.append("\n>\n".join(turns) + "\n\n" + "\n".join([*head, *lines]) + "\n")
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Escapes a text for one cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def main(options: Options) -> None:
    """Prints and plots the figures of the study."""
    evaluated = results.read(options.study)
    summary = frontier.summarise(frontier.rows_of(evaluated))
    written = table(summary)
    print(written)
    (options.study / "table.md").write_text(written, encoding="utf-8")
    agreed = frontier.agreement(evaluated)
    for kind, of in agreed.items():
        correlation = of["correlation"]
        r = (
            "no correlation to take"
            if correlation is None
            else f"r = {correlation:.2f}"
        )
        print(f"proxy and judge on {of['responses']} {kind} responses: {r}")
    figures = {"policies": summary, "of_reference": agreed}
    folder.write_json(options.study / "figures.json", figures)
    (options.study / "plots").mkdir(exist_ok=True)
    draw(summary).savefig(options.study / "plots" / "frontier.png", dpi=130)
    if options.shown:
        texts = side_by_side(evaluated, shown=options.shown)
        (options.study / "texts.md").write_text(texts, encoding="utf-8")
    print(f"figures.json, table.md and plots are in {options.study}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
