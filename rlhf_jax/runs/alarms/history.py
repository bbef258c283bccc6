"""Values of a metric over the rows of a stage, counted where they stand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # of metrics.jsonl: a number, None, or "NaN" or "Infinity"


def places(rows: Sequence[Row], name: str) -> Iterator[tuple[int, float]]:
    """(index, value) where it was measured, the newest first."""
    newest_first = range(len(rows) - 1, -1, -1)
    return _measured(((place, rows[place]) for place in newest_first), name)


def first(rows: Sequence[Row], name: str, count: int) -> list[float]:
    """The first values, up to `count` of them."""
    return _take(_measured(enumerate(rows), name), count)


def last(rows: Sequence[Row], name: str, count: int) -> list[float]:
    """The last values, up to `count` of them, the newest first."""
    return _take(places(rows, name), count)


def _take(measures: Iterator[tuple[int, float]], count: int) -> list[float]:
    return [value for _, value in itertools.islice(measures, count)]


def _measured(
    rows: Iterable[tuple[int, Row]], name: str
) -> Iterator[tuple[int, float]]:
    for place, row in rows:
        value = row.get(name)
        if value is not None and not math.isnan(float(value)):
            yield place, float(value)


def change(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the second half less that of the first, and its standard error."""
    half = len(values) // 2
    before, after = values[:half], values[-half:]
    error = math.sqrt((variance(before) + variance(after)) / half)
    return mean(after) - mean(before), error


def mean(values: Sequence[float]) -> float:
    """Their sum over their number."""
    return sum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """The unbiased one."""
    centre = mean(values)
    deviations = [value - centre for value in values]
    return sum(x * x for x in deviations) / (len(values) - 1)
