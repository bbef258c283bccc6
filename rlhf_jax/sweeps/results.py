"""What a sweep comes to: every measure of every cell, differences, and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_jax.runs import report
from rlhf_jax.sweeps import claims, measures, statistics
from rlhf_jax.sweeps.claims import Answered, Numbers
from rlhf_jax.sweeps.declaration import Cell, Sweep
from rlhf_jax.sweeps.planned import Planned
from rlhf_jax.sweeps.statistics import Estimate, Interval


class Results(NamedTuple):
    """The numbers of all runs that are done."""

    # {measure: {cell: {seed: value}}}
    values: Mapping[str, Mapping[Cell, Numbers]]
    absent: list[str]  # what to tell of measures that no run has
    answers: dict[str, tuple[str, Answered]]  # {name: (claim, answer)}


def check_claims(sweep: Sweep) -> None:
    """Checks, before anything runs, that every claim can be read.

    Raises:
      InputError: a claim has another form, or a measure or cell that there is not.
    """
    nothing = {name: {cell: {} for cell in sweep.cells} for name in sweep.measures}
    lookup = claims.lookup_in(sweep.cells, nothing)
    for claim in sweep.claims.values():
        claims.answer(claim, lookup=lookup)


def collected(sweep: Sweep, planned: Sequence[Planned]) -> Results:
    """The numbers of the runs that are done, of `planned.runs_of`.

    Raises:
      InputError: a file of a run cannot be read.
    """
    done = [run for run in planned if run.done]
    absent = []
    if done:
        absent = measures.absent(sweep.measures, runs=[run.folder for run in done])
    values: dict[str, dict[Cell, dict[int, float]]] = {
        name: {cell: {} for cell in sweep.cells} for name in sweep.measures
    }
    for run in done:
        for name, measure in sweep.measures.items():
            value = measures.measured(run.folder, measure)
            if value is not None:
                values[name][run.cell][run.seed] = value
    lookup = claims.lookup_in(sweep.cells, values)
    answers = {
        name: (claim, claims.answer(claim, lookup=lookup))
        for name, claim in sweep.claims.items()
    }
    return Results(values, absent, answers)


def as_json(sweep: Sweep, results: Results) -> dict[str, Any]:
    """results.json: per cell and measure the values by seed, estimates and differences.

    A difference is to the first cell, seed by seed.
    """
    first = sweep.cells[0]
    return {
        "question": sweep.question,
        "seeds": list(sweep.seeds),
        "cells": {
            cell.name: {
                name: {
                    "seeds": {str(seed): value for seed, value in of[cell].items()},
                    "estimate": _estimate(of[cell]),
                    "less_first_cell": _estimate(less(of[cell], of[first])),
                }
                for name, of in results.values.items()
            }
            for cell in sweep.cells
        },
        "claims": {
            name: {
                "claim": claim,
                "answer": answered.answer,
                "seeds": answered.seeds,
                "difference": answered.difference,
                "interval": answered.interval and list(answered.interval),
            }
            for name, (claim, answered) in results.answers.items()
        },
    }


def tell(sweep: Sweep, results: Results) -> None:
    """Prints a table of each measure, and one of the claims."""
    for name, of in results.values.items():
        report.table(
            f"{name}: mean (95% interval) over seeds",
            ("cell", "seeds", "mean", "interquartile mean", "less the first cell"),
            [
                (
                    *(cell.name, str(len(of[cell]))),
                    *_means(of[cell]),
                    "-" if not n else _means(less(of[cell], of[sweep.cells[0]]))[0],
                )
                for n, cell in enumerate(sweep.cells)
            ],
        )
    if results.answers:
        report.table(
            "Claims",
            ("claim", "answer", "seeds", "difference"),
            [
                (
                    f"{name}: {claim}",
                    answered.answer,
                    str(answered.seeds),
                    _cell(answered.difference, answered.interval),
                )
                for name, (claim, answered) in results.answers.items()
            ],
        )


def less(values: Numbers, others: Numbers) -> Numbers:
    """Differences of the seeds that both have."""
    return {seed: one - others[seed] for seed, one in values.items() if seed in others}


def _estimate(values: Numbers) -> dict[str, Any] | None:
    if not values:
        return None
    estimate: Estimate = statistics.estimate(list(values.values()))
    return {
        name: list(value) if isinstance(value, Interval) else value
        for name, value in estimate._asdict().items()
    }


def _means(values: Numbers) -> tuple[str, str]:
    """Mean and interquartile mean, with intervals."""
    if not values:
        return "-", "-"
    figure = statistics.estimate(list(values.values()))
    return _cell(figure.mean, figure.interval), _cell(figure.iqm, figure.iqm_interval)


def _cell(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "-"
    if interval is None:
        return f"{value:.4g}"
    return f"{value:.4g} ({interval.low:.4g} to {interval.high:.4g})"
