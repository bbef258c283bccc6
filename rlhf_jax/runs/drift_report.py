"""Tables and plots of the policy's distance from its reference.

measured = jax.device_get(drift.weight_drift(params, reference))
drift_report.table(measured)
drift_report.plots(folder, measured)    also reads the run's positions.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_jax.devices import processes
from rlhf_jax.runs import metrics, report, write_errors
from rlhf_jax.runs import plots as run_plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drift = Mapping[str, Any]  # as `drift.weight_drift` returns it, on the host


def table(drift: Drift) -> None:
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


def plots(folder: Path, drift: Drift) -> list[Path]:
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
    from matplotlib.figure import Figure  # loaded late, see `plots`

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
    run_plots.style(axis, "weight drift ‖Δ‖ / ‖ref‖\n[share of the reference]")
    run_plots.name_steps(axis, "layer")
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
        run_plots.style(axis, label)
    axes[0].legend(frameon=False)
    run_plots.name_steps(axes[-1], "position in the response")
    figure.align_ylabels()
    return figure
