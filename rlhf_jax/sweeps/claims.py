"""Claims about the cells of a sweep, and whether its seeds support them.

    gold(kl_coef=0.2) > gold(kl_coef=0)
    score(kl_coef=0.2) - score(kl_coef=0) > -0.5
    gold(estimator="k3") < 2 * gold(estimator="k1")

A measure is called with settings of the grid (penalty.value_estimator is shortened to
value_estimator). If several cells match, their mean counts. Equal seeds draw equal
prompts and keys, so the two sides are subtracted seed by seed. A claim is answered yes
if the 95% interval of the mean difference is above 0.
"""

from __future__ import annotations

import ast
import bisect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import located
from rlhf_jax.runs import parsing
from rlhf_jax.runs.parsing import Source
from rlhf_jax.sweeps import statistics
from rlhf_jax.sweeps.declaration import Cell, Value, short
from rlhf_jax.sweeps.statistics import Interval

Numbers = Mapping[int, float]  # {seed: value}
# (measure, settings of the grid) -> mean over the matching cells, by seed
Lookup = Callable[[str, Mapping[str, Value]], Numbers]
Answer = Literal["yes", "no", "not enough seeds"]
FEW = 3  # seeds
MOST = 10**6  # seeds, the largest number considered
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
FORM = "MEASURE(OPTION=VALUE) > MEASURE(OPTION=VALUE), with +, -, * and numbers"


class Answered(NamedTuple):
    """The answer to a claim, and its numbers."""

    answer: Answer
    seeds: int  # number that both sides have
    difference: float | None  # mean over seeds of the side claimed larger - the other
    interval: Interval | None


def answer(claim: str, *, lookup: Lookup) -> Answered:
    """Answers a claim.

    Returns:
      "yes" if the interval of the difference is above 0, "no" if it is below or every
      difference is 0, else "not enough seeds". Fewer than FEW equal differences may be
      equal by chance, and answer nothing.
    """
    source = Source(f"claim {claim!r:.200}", FORM, "write it so")
    tree = parsing.expression(claim, source)
    with located(source.where):
        difference = _difference(tree, lookup=lookup)
    values = np.asarray(list(difference.values()), float)
    interval = statistics.of_mean(values)
    mean = float(values.mean()) if len(values) else None
    return Answered(_verdict(interval, seeds=len(values)), len(values), mean, interval)


def _verdict(interval: Interval | None, *, seeds: int) -> Answer:
    equal = interval is not None and interval.low == interval.high
    if interval is None or (equal and seeds < FEW):
        return "not enough seeds"
    if interval.low > 0:
        return "yes"
    return "no" if interval.high < 0 or equal else "not enough seeds"


def seeds_needed(answered: Answered) -> int | None:
    """Returns the number of seeds that would answer an open claim.

    It is the least N whose t interval around the mean difference m excludes 0,

        t(0.975, N - 1)·s/√N < |m|,

    where m and s are the present mean and standard deviation of the differences. If all
    differences are equal, it is FEW. If the true difference is m, about half of the
    sweeps with N seeds measure a smaller one and stay open, so plan more.

    Returns:
      N; None with fewer than two seeds, which have no spread, and above MOST, as if
      m = 0.

    Source: Student 1908; on the half, Kupper & Hafner 1989, The American Statistician
    43(2).
    """
    if answered.interval is None or answered.difference is None:
        return None
    half = answered.interval.half
    if half == 0:
        return FEW
    # Half-widths for s = 1 decrease with N; the first one below |m|/s is needed.
    deviation = half / statistics.half_width(1.0, seeds=answered.seeds)
    counts = range(2, MOST + 1)
    needed = bisect.bisect_right(
        counts,
        -abs(answered.difference) / deviation,
        key=lambda n: -statistics.half_width(1.0, seeds=n),
    )
    return counts[needed] if needed < len(counts) else None


def lookup_in(
    cells: Sequence[Cell], values: Mapping[str, Mapping[Cell, Numbers]]
) -> Lookup:
    """Returns a lookup over all cells of a sweep, in {measure: {cell: numbers}}."""

    def lookup(measure: str, settings: Mapping[str, Value]) -> Numbers:
        if measure not in values:
            raise InputError(
                f"expected one of the measures {', '.join(values) or '(none)'}, got "
                f"{measure}"
            )
        fit = [
            cell
            for cell in cells
            if all(_has(cell, key, one) for key, one in settings.items())
        ]
        if not fit:
            shown = ", ".join(f"{key}={one!r}" for key, one in settings.items())
            raise InputError(
                f"expected settings that a cell of the grid has, got {shown}; cells "
                f"are {', '.join(cell.name for cell in cells[:5])}"
            )
        of_cells = [values[measure].get(cell, {}) for cell in fit]
        seeds = [seed for seed in of_cells[0] if all(seed in of for of in of_cells)]
        return {
            seed: sum(of[seed] for of in of_cells) / len(of_cells) for seed in seeds
        }

    return lookup


def _has(cell: Cell, key: str, value: Value) -> bool:
    """Whether a cell has a setting of a claim; 1 and 0 do not match True and False.

    The key is the last part of the option's name, or the whole name with _ for . and -.
    """
    values = dict(cell.values)
    by_name = {short(name, among=values): value for name, value in values.items()}
    by_name |= {re.sub(r"\W", "_", name): value for name, value in values.items()}
    if key not in by_name:
        raise InputError(
            f"expected options of the grid, {', '.join(by_name) or '(none)'}, got {key}"
        )
    own = by_name[key]
    return isinstance(own, bool) == isinstance(value, bool) and own == value


def _difference(tree: ast.expr, *, lookup: Lookup) -> Numbers:
    """The side of a claim that is said to be larger, minus the other one."""
    match tree:
        case ast.Compare(left, [ast.Gt() | ast.Lt() as operation], [right]):
            sides = [_value(side, lookup=lookup) for side in (left, right)]
        case _:
            raise _wrong("no comparison of two sides by > or <")
    larger_first = sides if isinstance(operation, ast.Gt) else sides[::-1]
    difference = _combined(operator.sub, *larger_first)
    if isinstance(difference, Mapping):
        return difference
    raise _wrong("numbers alone")


def _value(node: ast.expr, *, lookup: Lookup) -> Numbers | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(
            number, bool
        ) and math.isfinite(number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = _value(inner, lookup=lookup)
            return _combined(operator.mul, -1.0, value)
        case ast.BinOp(
            left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right
        ):
            sides = [_value(side, lookup=lookup) for side in (left, right)]
            value = _combined(OPERATIONS[type(op)], *sides)
            if isinstance(value, Mapping) or math.isfinite(value):
                return value
        case ast.Call(func=name, args=[]) if all(one.arg for one in node.keywords):
            return _called(name, node.keywords, lookup=lookup)
    raise _wrong(ast.unparse(node))


def _called(
    name: ast.expr, keywords: Sequence[ast.keyword], *, lookup: Lookup
) -> Numbers:
    settings: dict[str, Value] = {}
    for keyword in keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            raise _wrong(ast.unparse(keyword.value)) from None
        if keyword.arg in settings:
            raise _wrong(f"{keyword.arg} twice")
        settings[str(keyword.arg)] = tuple(value) if isinstance(value, list) else value
    try:
        return lookup(ast.unparse(name), settings)
    except InputError as error:
        raise InputError(f"{error}; correct it") from None


def _combined(
    operation: Callable[[float, float], float],
    left: Numbers | float,
    right: Numbers | float,
) -> Numbers | float:
    """Combines two sides by seed, for the seeds of both; a number has every seed.

    A result that overflows float64 is left out, like a run without a number.
    """
    if not isinstance(left, Mapping) and not isinstance(right, Mapping):
        return float(operation(left, right))
    sides = [side for side in (left, right) if isinstance(side, Mapping)]
    seeds = [seed for seed in sides[0] if seed in sides[-1]]
    ours, theirs = (
        side if isinstance(side, Mapping) else dict.fromkeys(seeds, side)
        for side in (left, right)
    )
    values = {seed: float(operation(ours[seed], theirs[seed])) for seed in seeds}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _wrong(got: str) -> InputError:
    return InputError(f"expected {FORM}, got {got:.80}; write it so")
