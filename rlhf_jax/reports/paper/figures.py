"""Figures of a sweep at a column's width: every seed, means, and their intervals.

PDF and SVG are written without a date, so that equal sweeps have equal files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_jax.reports import glossary
from rlhf_jax.reports.paper import tables
from rlhf_jax.reports.paper.latex import escaped
from rlhf_jax.runs import write_errors
from rlhf_jax.sweeps import statistics
from rlhf_jax.sweeps.claims import Numbers
from rlhf_jax.sweeps.declaration import Cell, Measure, Sweep
from rlhf_jax.sweeps.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # publishers refuse Type 3
    "svg.hashsalt": "rlhf_jax",
}
METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
PER_CELL, PER_LINE, AROUND = 0.21, 0.12, 0.75  # inches of height
LONG, WIDE = 28, 56  # characters of a line beside the axis, and above it
BELOW = 0.28  # distance of the seeds below their mean, as a share of a cell's height
MEAN: dict[str, Any] = {"fmt": "D", "markersize": 3, "linewidth": 1, "capsize": 2}
COLOUR, SEED_COLOUR = "#1f4e79", "#7f9db9"
FRONTIER, LEGEND_LINE = 0.75, 0.13  # height over width, and inches of a legend's line
# Matches objective/kl, policy.kl and held_out_kl_after; no coefficients or shares.
KL = re.compile(r"(?:^|[/._])kl(?:$|[/._](?!coef|every|\w*frac))")


class Drawn(NamedTuple):
    """A figure and its caption."""

    name: str
    caption: str
    figure: Figure

    def save(self, folder: Path) -> None:
        """Writes NAME.pdf and NAME.svg."""
        from matplotlib import rc_context

        for kind, metadata in METADATA.items():
            path = folder / f"{self.name}.{kind}"
            with rc_context(STYLE), write_errors.writing(path):
                self.figure.savefig(path, metadata=metadata)

    def latex(self) -> str:
        """Returns a LaTeX float that includes the PDF."""
        return (
            "\\begin{figure}\n  \\centering\n"
            f"  \\includegraphics[width=\\columnwidth]{{figures/{self.name}.pdf}}\n"
            f"  \\caption{{{escaped(self.caption)}}}\n"
            f"  \\label{{fig:{self.name}}}\n\\end{{figure}}\n"
        )


def of_measures(sweep: Sweep, of: Results, *, width: float) -> list[Drawn]:
    """Draws each measure that some run has."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        return [
            Drawn(
                name,
                _caption(name, sweep, of),
                _figure(name, sweep, of, width=width),
            )
            for name, of_cells in of.values.items()
            if any(of_cells.values())
        ]


def of_frontiers(sweep: Sweep, of: Results, *, width: float) -> list[Drawn]:
    """Draws each other measure against the first measure that is a KL, if any is.

    Each cell is drawn with the seeds that have both measures.
    """
    from matplotlib import rc_context

    kls = [
        name
        for name, measure in sweep.measures.items()
        if KL.search(measure.summary or measure.metric or "")
    ]
    drawn = []
    for name in sweep.measures if kls else ():
        points = {
            cell: [
                (of.values[kls[0]][cell][seed], y)
                for seed, y in sorted(ys.items())
                if seed in of.values[kls[0]][cell]
            ]
            for cell, ys in of.values[name].items()
        }
        points = {cell: pairs for cell, pairs in points.items() if pairs}
        if name not in kls and points:
            caption = (
                f"{name}, {_what(sweep.measures[name])}, against {kls[0]}, "
                f"{_what(sweep.measures[kls[0]])}: means over seeds of each cell "
                f"({', '.join(tables.axes(sweep))}) with 95% Student's t intervals of "
                f"both; small dots are seeds."
            )
            with rc_context(STYLE):
                axes = (kls[0], name)
                figure = _frontier(axes, sweep, points, width=width)
            drawn.append(Drawn(f"{name}_against_{kls[0]}", caption, figure))
    return drawn


def _caption(name: str, sweep: Sweep, of: Results) -> str:
    counts = [len(seeds) for seeds in of.values[name].values() if seeds]
    least, most = min(counts), max(counts)
    seeds = f"{most} seeds" if least == most else f"{least} to {most} seeds"
    text = (
        f"{name}, {_what(sweep.measures[name])}, of each cell "
        f"({', '.join(tables.axes(sweep))}): the mean over "
        f"{'1 seed' if most == 1 else seeds} with its 95% Student's t interval; small "
        f"dots are seeds."
    )
    return text + (" One seed alone has no interval." if least == 1 else "")


def _what(measure: Measure) -> str:
    if measure.summary is not None:
        return f"{measure.summary} of summary.json"
    rows = "last row" if measure.last == 1 else f"mean of the last {measure.last} rows"
    return f"{measure.metric}, {rows}"


def _figure(name: str, sweep: Sweep, of: Results, *, width: float) -> Figure:
    from matplotlib.figure import Figure

    shown = [_plain(fill(", ".join(tables.labels(one)), LONG)) for one in sweep.cells]
    lines = max(label.count("\n") + 1 for label in shown)
    height = AROUND + len(shown) * max(PER_CELL, PER_LINE * lines)
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    for place, cell in enumerate(sweep.cells):
        _cell(axis, of.values[name][cell], place=place)
    axis.set_yticks(range(len(shown)), shown)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    names = _plain(", ".join(tables.axes(sweep)))
    figure.suptitle(fill(names, WIDE), fontsize=STYLE["font.size"], x=0, ha="left")
    axis.set_xlabel(_with_unit(name, sweep))
    axis.grid(axis="x", alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _frontier(
    names: tuple[str, str],
    sweep: Sweep,
    points: Mapping[Cell, Sequence[tuple[float, float]]],
    *,
    width: float,
) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    height = FRONTIER * width + LEGEND_LINE * len(points)
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    colours = colormaps["viridis"].resampled(len(points) + 1)  # yellow is left out
    for place, (cell, pairs) in enumerate(points.items()):
        of_both = [statistics.estimate(values) for values in zip(*pairs, strict=True)]
        # A single seed has no interval.
        x_half, y_half = (one.interval and one.interval.half for one in of_both)
        axis.plot(*zip(*pairs, strict=True), "o", color=colours(place), markersize=1.5)
        axis.errorbar(
            *(one.mean for one in of_both),
            xerr=x_half,
            yerr=y_half,
            color=colours(place),
            label=_plain(", ".join(tables.labels(cell))),
            **MEAN,
        )
    for name, label in zip(names, (axis.set_xlabel, axis.set_ylabel), strict=True):
        label(_with_unit(name, sweep))
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    title = _plain(fill(", ".join(tables.axes(sweep)), WIDE))
    figure.legend(loc="outside lower left", title=title, frameon=False)
    return figure


def _with_unit(name: str, sweep: Sweep) -> str:
    metric = sweep.measures[name].metric or ""
    unit = glossary.entry_of(metric, entries=glossary.read()).unit
    return _plain(f"{name} [{unit}]" if unit else name)


def _cell(axis: Axes, numbers: Numbers, *, place: int) -> None:
    if not numbers:
        return
    values = [value for _, value in sorted(numbers.items())]
    estimate = statistics.estimate(values)
    below = [place + BELOW] * len(values)
    axis.plot(values, below, "o", color=SEED_COLOUR, markersize=2)
    axis.errorbar(
        estimate.mean,
        place,
        xerr=estimate.interval and estimate.interval.half,
        color=COLOUR,
        **MEAN,
    )


def _plain(text: str) -> str:
    """Escapes $, by which matplotlib would begin a formula."""
    return text.replace("$", r"\$")
