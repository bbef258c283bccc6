"""Values of a metric over the rows of a stage; rows without a value are skipped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # of metrics.jsonl: a number, None, or "NaN" or "Infinity"


def first(rows: Sequence[Row], name: str, count: int) -> list[float]:
    """Returns the first values, at most `count`."""
    return _values(rows, places(rows, name), name, count)


def last(rows: Sequence[Row], name: str, count: int) -> list[float]:
    """Returns the last values, at most `count`, the newest first."""
    return _values(rows, places(rows, name, newest_first=True), name, count)


def places(
    rows: Sequence[Row], name: str, *, newest_first: bool = False
) -> Iterator[int]:
    """Yields the indices of the rows in which the metric was measured."""
    order = range(len(rows))
    for place in reversed(order) if newest_first else order:
        value = rows[place].get(name)
        if value is not None and not math.isnan(float(value)):
            yield place


def windowed(rows: Sequence[Row], name: str, window: int) -> float | None:
    """Returns the mean of the last `window` values; None if there are fewer."""
    values = last(rows, name, window)
    return mean(values) if len(values) == window else None


def _values(
    rows: Sequence[Row], at: Iterator[int], name: str, count: int
) -> list[float]:
    return [float(rows[place][name]) for place in itertools.islice(at, count)]


def change(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean(second half) - mean(first half), and its standard error."""
    half = len(values) // 2
    before, after = values[:half], values[-half:]
    error = math.sqrt((variance(before) + variance(after)) / half)
    return mean(after) - mean(before), error


def mean(values: Sequence[float]) -> float:
    """Returns the mean of the values."""
    return sum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """Returns the unbiased variance (ddof 1) of the values."""
    centre = mean(values)
    deviations = [value - centre for value in values]
    return sum(x * x for x in deviations) / (len(values) - 1)
