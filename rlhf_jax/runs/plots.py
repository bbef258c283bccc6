"""Plots of a run's metrics by topic, and how far its policy is from the reference.

    plots.draw(folder)                    metrics over the steps
    measured = jax.device_get(drift.weight_drift(params, reference))
    plots.drift_table(measured)
    plots.draw_drift(folder, measured)    also reads the run's positions.jsonl

Matplotlib is imported with the first figure, so a run starts half a second sooner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_jax.devices import processes
from rlhf_jax.runs import metrics, report, write_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drift = Mapping[str, Any]  # as `drift.weight_drift` returns it, on the host
PLOTS: dict[str, dict[str, dict[str, str]]] = {
    "language_model": {"loss\n[nats per token]": {"loss/language_model": "loss"}},
    "reward_model": {
        "loss\n[nats per pair]": {"loss/pairwise": "loss"},
        "accuracy\n[share of pairs]": {"pairwise/accuracy": "accuracy"},
    },
    "dpo": {
        "loss\n[a pair]": {"loss/dpo": "loss"},
        "accuracy\n[share of pairs]": {"dpo/accuracy": "accuracy"},
        "implicit reward\n[reward units]": {
            "dpo/chosen_reward": "chosen",
            "dpo/rejected_reward": "rejected",
            "kto/desirable_reward": "desirable",
            "kto/undesirable_reward": "undesirable",
        },
        "log-probability\n[nats per response]": {
            "dpo/chosen_logprob": "chosen",
            "dpo/rejected_logprob": "rejected",
            "kto/desirable_logprob": "desirable",
            "kto/undesirable_logprob": "undesirable",
        },
    },
    "reward": {
        "reward\n[reward units per response]": {
            "objective/scores": "score",
            "objective/rlhf_reward": "score minus KL penalty",
        },
        "held-out judge\n[its own units]": {"judge/score": "judge"},
    },
    "kl": {
        "KL to the reference\n[nats per response]": {
            "objective/kl": "k1",
            "objective/kl_k3": "k3",
        },
        "KL coefficient\n[reward units per nat]": {"objective/kl_coef": "coefficient"},
    },
    "entropy": {"entropy\n[nats per token]": {"objective/entropy": "policy"}},
    "drift": {
        "weight drift\n[share of the reference]": {
            "drift/relative": "Σ‖Δ‖ / Σ‖ref‖",
            "drift/global_norm": "‖Δ‖ / ‖ref‖",
        },
    },
    "perplexity": {
        "log perplexity\n[nats per token]": {
            "objective/ref_nll": "responses, under the reference",
            "eval/held_out_nll": "held-out text, under the policy",
            "eval/out_of_domain_nll": "out-of-domain text, under the policy",
        },
    },
    "losses": {
        "policy loss\n[reward units]": {"loss/policy": "policy"},
        "value loss\n[reward units²]": {"loss/value": "value"},
    },
    "length": {
        "response length\n[tokens]": {"response/length": "length"},
        "share of responses": {
            "response/eos_fraction": "ended by EOS",
            "response/distinct_fraction": "distinct",
        },
    },
}
"""{figure: {y label of a panel: {metric: label of its line}}}"""


def draw(folder: Path) -> list[Path]:
    """Draws the metrics in folder/metrics.jsonl as folder/plots/*.png.

    Each stage and metric has one line. A long run shows the running mean, over the
    single steps in a lighter colour. Steps that were not measured are gaps.

    Returns:
      Paths of the figures drawn: those of `PLOTS` with a metric in some row. Of several
      processes only the first draws.

    Raises:
      WriteError: the figures cannot be written.
    """
    if not processes.is_first():
        return []
    rows = metrics.read(folder / "metrics.jsonl")
    drawn = []
    with write_errors.writing(folder / "plots"):
        (folder / "plots").mkdir(exist_ok=True)
        for name, panels in PLOTS.items():
            names = {metric for lines in panels.values() for metric in lines}
            measured = [row for row in rows if not names.isdisjoint(row)]
            if measured:
                drawn.append(folder / "plots" / f"{name}.png")
                _figure(measured, panels).savefig(drawn[-1], dpi=150)
    return drawn


def _figure(rows: list[dict[str, Any]], panels: dict[str, dict[str, str]]) -> Figure:
    from matplotlib.figure import Figure

    stages = list(dict.fromkeys(row["stage"] for row in rows))
    window = 1 + len(rows) // len(stages) // 25
    figure = Figure(figsize=(7, 1.2 + 2.3 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (label, lines) in zip(axes, panels.items(), strict=True):
        for stage, (metric, name) in itertools.product(stages, lines.items()):
            measured = [r for r in rows if r["stage"] == stage and metric in r]
            if measured:
                name = name if len(stages) == 1 else f"{stage}: {name}"
                _line(axis, measured, metric, label=name, window=window)
        style(axis, label)
        handles, labels = axis.get_legend_handles_labels()
        if len(labels) > 1:
            axis.legend(handles, labels, frameon=False)
    note = f" (bold: mean of {window} steps)" if window > 1 else ""
    name_steps(axes[-1], f"step of {', '.join(stages)}{note}")
    figure.align_ylabels()
    return figure


def style(axis: Axes, label: str) -> None:
    """Labels the y axis, draws a faint grid, and hides the frame above and right."""
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def name_steps(axis: Axes, label: str) -> None:
    """Labels the x axis, and sets its ticks at integers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _line(
    axis: Axes, rows: list[dict[str, Any]], metric: str, *, label: str, window: int
) -> None:
    steps = [row["step"] for row in rows]
    values = np.array(
        [math.nan if row[metric] is None else float(row[metric]) for row in rows]
    )
    finite = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    counts = np.convolve(finite, kernel, mode="same")
    mean = np.where(finite, sums / np.maximum(counts, 1.0), np.nan)
    marker = "o" if len(rows) <= 25 else None
    (bold,) = axis.plot(steps, mean, label=label, marker=marker, markersize=3)
    if window > 1:
        axis.plot(steps, values, color=bold.get_color(), alpha=0.3, linewidth=0.8)


def drift_table(drift: Drift) -> None:
    """Prints the weight drift of each module, largest first, and of the whole model.

    A module of L layers is one row: its drift summed over the layers, and the layer
    that moved most. Relative drift is a share of the reference's norm, and is left out
    where that norm is 0.
    """
    rows = []
    for path, module in drift["modules"].items():
        moved, size = (float(np.sum(module[name])) for name in ("absolute", "size"))
        relative = np.ravel(module["relative"])
        most = (None, None)
        if relative.size > 1 and size > 0:
            most = (float(relative.max()), int(relative.argmax()))
        rows.append((path, moved, moved / size if size > 0 else None, *most))
    rows.sort(key=lambda row: -1.0 if row[2] is None else row[2], reverse=True)
    rows.append(("all", float(drift["absolute"]), float(drift["relative"]), None, None))
    report.table(
        "Weight drift",
        ("module", "absolute", "relative", "at most", "layer"),
        rows,
    )
    print(f"as one vector, ‖Δ‖ / ‖ref‖: {float(drift['global_norm']):.4g}")


def draw_drift(folder: Path, drift: Drift) -> list[Path]:
    """Draws plots/drift_by_layer.png and plots/kl_by_position.png.

    Returns:
      Paths of the figures drawn; the second needs rows in folder/positions.jsonl. Of
      several processes only the first draws.
    """
    if not processes.is_first():
        return []
    drawn = [folder / "plots" / "drift_by_layer.png"]
    with write_errors.writing(folder / "plots"):
        (folder / "plots").mkdir(exist_ok=True)
        _by_layer(drift).savefig(drawn[0], dpi=150)
        if rows := metrics.read(folder / "positions.jsonl"):
            drawn.append(folder / "plots" / "kl_by_position.png")
            _by_position(rows).savefig(drawn[1], dpi=150)
    return drawn


def _by_layer(drift: Drift) -> Figure:
    """One line per module over the layers; other parameters are named in the title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axis = figure.subplots()
    relative = {
        path: np.asarray(module["relative"])
        for path, module in drift["modules"].items()
        if np.isfinite(module["relative"]).any()  # NaN where the reference is 0
    }
    layers = {path: values for path, values in relative.items() if values.ndim}
    for number, (path, values) in enumerate(layers.items()):
        axis.plot(
            np.where(np.isfinite(values), values, np.nan),
            linestyle=("-", "--", ":")[number // 10 % 3],
            color=f"C{number % 10}",
            marker="o" if len(values) <= 25 else None,
            markersize=3,
            label=path.removeprefix("layers/"),
        )
    style(axis, "weight drift ‖Δ‖ / ‖ref‖\n[share of the reference]")
    name_steps(axis, "layer")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    outside = [
        f"{path} {float(values):.3g}"
        for path, values in relative.items()
        if not values.ndim
    ]
    note = f"outside of the layers: {', '.join(outside)}"
    axis.set_title(note, fontsize=8, loc="left", wrap=True)
    return figure


def _by_position(rows: list[dict[str, Any]]) -> Figure:
    """k1 and k3 by position at the first, the middle and the last recorded step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.5), layout="constrained")
    panels = {
        "k1\n[nats per token]": "k1",
        "k3\n[nats per token]": "k3",
        "responses\nthat reach it": "responses",
    }
    chosen = {row["step"]: row for row in (rows[0], rows[len(rows) // 2], rows[-1])}
    axes = figure.subplots(len(panels), sharex=True)
    for axis, (label, name) in zip(axes, panels.items(), strict=True):
        for step, row in chosen.items():
            values = [np.nan if x is None else float(x) for x in row[name]]
            axis.plot(values, marker="o", markersize=3, label=f"step {step}")
        style(axis, label)
    axes[0].legend(frameon=False)
    name_steps(axes[-1], "position in the response")
    figure.align_ylabels()
    return figure
