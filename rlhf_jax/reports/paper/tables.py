"""Tables of a sweep: CSV with every digit; Markdown and LaTeX rounded by intervals."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rlhf_jax.reports.paper.latex import escaped
from rlhf_jax.runs.run_config import word
from rlhf_jax.sweeps import claims, results, statistics
from rlhf_jax.sweeps.claims import Answered, Numbers
from rlhf_jax.sweeps.declaration import Cell, Sweep, short
from rlhf_jax.sweeps.results import Results
from rlhf_jax.sweeps.statistics import Interval

INTERVALS = "mean over seeds ± half-width of its 95% Student's t interval"
OPEN = "not enough seeds"
NONE = "—"
WIDE = 64  # characters beyond which a table spans both columns of a page
LONG = 28  # characters beyond which a cell is broken into lines


class Table(NamedTuple):
    """A table as shown, and its unrounded numbers."""

    name: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    raw_header: Sequence[str]
    raw_rows: Sequence[Sequence[Any]]  # None is a missing number
    num_labels: int  # number of text columns, on the left

    def csv(self) -> str:
        """Returns the numbers with every digit."""
        return as_csv(self.raw_header, self.raw_rows)

    def markdown(self) -> str:
        """Returns the caption and the table."""
        sides = [":--" if n < self.num_labels else "--:" for n in range(self._width)]
        lines = [self.header, sides, *self.rows]
        rows = [f"| {' | '.join(map(as_markdown, line))} |" for line in lines]
        return "\n".join([as_markdown(self.caption), "", *rows]) + "\n"

    def latex(self) -> str:
        """Returns a float with booktabs' rules; a wide one spans both columns."""
        columns = [*zip(self.header, *self.rows, strict=True)]
        widths = [max(map(len, column)) for column in columns]
        kinds = ["l" if n < self.num_labels else "r" for n in range(self._width)]
        float_ = "table*" if sum(widths) + 2 * self._width > WIDE else "table"
        if (longest := max(widths[: self.num_labels], default=0)) > LONG:
            kinds[widths.index(longest)] = r"p{0.42\linewidth}"
        lines = [" & ".join(map(escaped, row)) + r" \\" for row in self.rows]
        return "\n".join(
            [
                f"\\begin{{{float_}}}",
                "  \\centering\\small",
                f"  \\caption{{{escaped(self.caption)}}}",
                f"  \\label{{tab:{self.name}}}",
                f"  \\begin{{tabular}}{{{''.join(kinds)}}}",
                "    \\toprule",
                f"    {' & '.join(map(escaped, self.header))} \\\\",
                "    \\midrule",
                *(f"    {line}" for line in lines),
                "    \\bottomrule",
                "  \\end{tabular}",
                f"\\end{{{float_}}}\n",
            ]
        )

    @property
    def _width(self) -> int:
        return len(self.header)


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns CSV with full precision; None is an empty cell."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return file.getvalue()


def rounded(value: float, interval: Interval | None) -> str:
    """Returns a mean ± half of its interval, which has two significant digits.

    >>> rounded(1.12841, Interval(0.81326, 1.44356)), rounded(1.12841, None)
    ('1.13 ± 0.32', '1.128')
    """
    if interval is None:
        return f"{value:.4g}"
    half = interval.half
    if half == 0:
        return f"{value:.4g} ± 0"
    digits = 1 - math.floor(math.log10(half))
    if digits > 9:
        return f"{value:.4g} ± {half:.2g}"
    places = max(digits, 0)  # adding 0.0 turns -0.0 into 0.0
    mean, half = (round(one, digits) + 0.0 for one in (value, half))
    return f"{mean:.{places}f} ± {half:.{places}f}"


def axes(sweep: Sweep) -> list[str]:
    """Returns the names of the grid's axes, shortened where unambiguous."""
    names = [name for name, _ in sweep.cells[0].values]
    return [short(name, among=names) for name in names] or ["run"]


def labels(cell: Cell) -> list[str]:
    """Returns a cell's value on each axis."""
    return [word(value) for _, value in cell.values] or ["all"]


def all_tables(sweep: Sweep, of: Results) -> list[Table]:
    """Makes every table."""
    tables = [_means(sweep, of)]
    if len(sweep.cells) > 1:
        tables.append(_differences(sweep, of))
    if of.answers:
        tables.append(_claims(of))
    return tables


def values(sweep: Sweep, of: Results) -> str:
    """Returns every number as CSV: cell, seed, measure, value."""
    return as_csv(
        [*axes(sweep), "seed", "measure", "value"],
        [
            [*labels(cell), seed, measure, value]
            for measure, of_cells in of.values.items()
            for cell, of_seeds in of_cells.items()
            for seed, value in sorted(of_seeds.items())
        ],
    )


def needed(answered: Answered) -> str:
    """Returns the seeds that an open claim needs; a dash if it is answered."""
    if answered.answer != OPEN:
        return NONE
    if answered.interval is None:
        return "not known"
    count = claims.seeds_needed(answered)
    return f"over {claims.MOST:,}" if count is None else f"{count:,}"


def _means(sweep: Sweep, of: Results) -> Table:
    caption = f"{sweep.question} " if sweep.question else ""
    caption += f"{INTERVALS[0].upper()}{INTERVALS[1:]}."
    return _estimates("results", caption, sweep, of=of.values, cells=sweep.cells)


def _differences(sweep: Sweep, of: Results) -> Table:
    first = sweep.cells[0]
    less = {
        measure: {
            cell: results.less(of_cells[cell], of_cells[first]) for cell in sweep.cells
        }
        for measure, of_cells in of.values.items()
    }
    caption = (
        f"Differences from {first.name}, paired by seed: {INTERVALS}, over the seeds "
        f"that both cells have."
    )
    return _estimates("differences", caption, sweep, of=less, cells=sweep.cells[1:])


def _estimates(
    name: str,
    caption: str,
    sweep: Sweep,
    *,
    of: Any,
    cells: Sequence[Cell],
) -> Table:
    rows, raw_rows = [], []
    for cell in cells:
        counts = sorted({len(of_cells[cell]) for of_cells in of.values()})
        shown = [_shown(of_cells[cell]) for of_cells in of.values()]
        count = str(counts[0]) if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
        rows.append([*labels(cell), count, *shown])
        raw_rows += [
            [*labels(cell), measure, *_raw(of_cells[cell])]
            for measure, of_cells in of.items()
        ]
    header = axes(sweep)
    return Table(
        name,
        caption,
        [*header, "seeds", *of],
        rows,
        [*header, "measure", "seeds", "mean", "low", "high"],
        raw_rows,
        len(header),
    )


def _claims(of: Results) -> Table:
    rows, raw_rows = [], []
    for name, (claim, answered) in of.answers.items():
        mean, interval = answered.difference, answered.interval
        shown = NONE if mean is None else rounded(mean, interval)
        rows.append(
            [name, answered.answer, str(answered.seeds), shown, needed(answered)]
        )
        count = claims.seeds_needed(answered) if answered.answer == OPEN else None
        low, high = interval or (None, None)
        raw_rows.append(
            [name, claim, answered.answer, answered.seeds, mean, low, high, count]
        )
    caption = (
        f"Claims. A difference is the side claimed to be larger minus the other one, "
        f"paired by seed: {INTERVALS}. A claim is answered where the interval excludes "
        f"0. For open claims the last column has the number of seeds whose interval "
        f"would exclude it at the present mean and spread."
    )
    return Table(
        "claims",
        caption,
        ["claim", "answer", "seeds", "difference", "seeds needed"],
        rows,
        ["name", "claim", "answer", "seeds", "difference", "low", "high", "needed"],
        raw_rows,
        2,
    )


def _raw(numbers: Numbers) -> list[Any]:
    if not numbers:
        return [0, None, None, None]
    estimate = statistics.estimate(list(numbers.values()))
    return [estimate.seeds, estimate.mean, *(estimate.interval or (None, None))]


def _shown(numbers: Numbers) -> str:
    if not numbers:
        return NONE
    estimate = statistics.estimate(list(numbers.values()))
    return rounded(estimate.mean, estimate.interval)


def as_markdown(text: str) -> str:
    """Returns text on one line, escaped for Markdown."""
    return re.sub(r"([|<*`\\])", r"\\\1", " ".join(text.split()))
