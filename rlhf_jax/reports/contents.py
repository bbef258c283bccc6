"""The data of the page as JSON, within a limit on its size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import document, glossary, grouping, samples
from rlhf_jax.reports.curves import FINER, KL, curves, tables, thinned
from rlhf_jax.reports.grouping import Groups
from rlhf_jax.reports.reading import Run
from rlhf_jax.runs.alarms import verdicts
from rlhf_jax.runs.metrics import finite

SIZE = 9_500_000  # bytes of JSON; Plotly takes 4.8 million more
CURVES = 6_000_000  # largest part of SIZE for curves
POINTS = (400, 200, 140, 100, 70, 50, 35, 25)  # per curve; the most that fit are used
FEWEST = 3000  # least bytes of a run's samples, while all together are below LEAST
FLAGGED = ("hacked", "collapsed", "degraded")  # verdicts shown first
LEAST = 2_000_000  # bytes always allowed for curves, and for samples
NUMBER = 4  # least bytes of a number of a curve; most take 7
MORE = 10  # a run reads samples of at most this many times its even share
FIRST = (
    *(verdicts.SCORE, verdicts.JUDGE, KL, "objective/ref_nll"),
    *("response/length", "response/distinct_fraction", "objective/entropy"),
    *("loss/divergence", "loss/dpo", "dpo/accuracy", "dpo/margin", "loss/pairwise"),
    *("pairwise/accuracy", "loss/language_model"),
)
SHOWN = 6  # curves when the page opens

Json = Any


class Contents(NamedTuple):
    """The data of a page."""

    data: dict[str, Json]
    notes: list[str]  # on damaged or missing runs, and on what was left out


def contents(
    runs: Sequence[Run],
    *,
    title: str,
    metrics: Sequence[str] = (),
    waiting: Sequence[str] = (),
    size: int = SIZE,
) -> Contents:
    """Builds the data of the page.

    Args:
      runs: the runs, from `reading.read_all`.
      metrics: metrics whose curves are open first; empty takes those of FIRST.
      waiting: names of runs without a row yet.
      size: largest number of bytes of the data as JSON. To stay below it, curves get
        fewer points, and then samples are left out; a note says so.
    """
    groups = grouping.grouped(runs)
    _check_metrics(metrics, runs)
    have = "1 run has" if len(waiting) == 1 else f"{len(waiting)} runs have"
    notes = [f"{have} no step yet: {', '.join(waiting[:5])}"] if waiting else []
    notes += _unproved(runs)
    notes += _diverged(runs)
    notes += _repeated(runs, groups)
    group_of = {run: g for g, group in enumerate(groups.groups) for run in group.runs}
    rows, records = [], []
    for number, run in enumerate(runs):
        of_run = samples.rows_of(run)
        record = _record(run, group=group_of[number], rows=of_run)
        records.append(record | {"sampled": len(of_run)})
        # Bounds memory: a run of many keeps few more samples than are shown.
        rows.append(samples.within(of_run, size=max(FEWEST, MORE * size // len(runs))))
    flagged = [n for n, one in enumerate(records) if one["verdict"]["kind"] in FLAGGED]
    left = max(size - document.written(records), LEAST)
    drawn, points, left_out = _curves(
        runs,
        groups,
        limit=min(CURVES, size * 2 // 3, left),
        metrics=metrics,
        first=[group_of[number] for number in flagged],
    )
    if left_out:
        notes.append(
            f"Curves are of {len(groups.groups) - left_out} of {len(groups.groups)} "
            f"configs, to bound the page; the table has all runs. Give fewer runs for "
            f"the others."
        )
    steps = max(row["step"] + 1 for run in runs for row in run.metrics)
    if points < min(steps, POINTS[0]):
        notes.append(
            f"To bound the page, curves show {points} of up to {steps} steps, those of "
            f"reward, judge, KL and other main metrics {min(steps, FINER * points)}."
        )
    data: dict[str, Json] = {
        "title": title,
        "options": list(groups.options),
        "groups": [
            {"name": group.name, "runs": list(group.runs), "values": list(group.values)}
            for group in groups.groups
        ],
        "curves": drawn,
        "first": _first(metrics, drawn),
        "glossary": _glossary(drawn),
        "notes": notes,
        "runs": records,
    }
    least = min(FEWEST * len(runs), LEAST)
    left = max(size - document.written(data), least)
    shown_rows = _shared_out(rows, size=left, first=flagged)
    for record, mine in zip(records, shown_rows, strict=True):
        record["samples"] = mine
    shown, recorded = sum(map(len, shown_rows)), sum(r["sampled"] for r in records)
    if shown < recorded:
        notes.append(
            f"{shown} of {recorded} recorded responses are shown, to bound the page: "
            f"of each run the extremes by KL, reward and length, then whole steps; "
            f"samples.jsonl of a run has all."
        )
    return Contents(data, notes)


def _unproved(runs: Sequence[Run]) -> list[str]:
    """A note for each damaged run, and one on runs whose files are not proven."""
    notes = [
        f"{run.name} IS DAMAGED, and its numbers are shown as they stand: "
        f"{'; '.join(run.faults[:5])}"
        for run in runs
        if run.faults
    ]
    doubtful = [run for run in runs if run.unproven and not run.faults]
    if doubtful:
        notes.append(
            f"Files of {len(doubtful)} of {len(runs)} runs are not proven, for example "
            f"of {doubtful[0].name}: {'; '.join(doubtful[0].unproven[:3])}."
        )
    return notes


def _diverged(runs: Sequence[Run]) -> list[str]:
    """A note on numbers that are not finite, which means over seeds leave out."""
    having = [run for run in runs if run.not_finite]
    if not having:
        return []
    name, step = min(having[0].not_finite.items(), key=lambda item: item[1])
    return [
        f"{len(having)} of {len(runs)} runs have numbers that are not finite, for "
        f"example {having[0].name} in {name} from step {step}: curves and their means "
        f"over seeds leave them out, and the tables show – where the last one is such."
    ]


def _repeated(runs: Sequence[Run], groups: Groups) -> list[str]:
    """A note for each config and seed that occurs in several folders."""
    of_seed: dict[tuple[int, str], list[str]] = {}
    for number, group in enumerate(groups.groups):
        for member in group.runs:
            seed = json.dumps(runs[member].config.get(grouping.SEED))
            of_seed.setdefault((number, seed), []).append(runs[member].name)
    return [
        f"{', '.join(names[:5])} have one config and seed {seed}: they repeat one "
        f"run, so that bands over seeds are narrower than they should be."
        for (_, seed), names in of_seed.items()
        if len(names) > 1
    ]


def _check_metrics(metrics: Sequence[str], runs: Sequence[Run]) -> None:
    known = set().union(*(run.names for run in runs))
    if unknown := [metric for metric in metrics if metric not in known]:
        raise InputError(
            f"--metrics: expected metrics of these runs, got {unknown[0]}, which no "
            f"run has; choose among {', '.join(sorted(known))}"
        )


def _curves(
    runs: Sequence[Run],
    groups: Groups,
    *,
    limit: int,
    metrics: Sequence[str],
    first: Sequence[int],
) -> tuple[dict[str, Json], int, int]:
    """The curves with the most points that fit in `limit` bytes.

    Args:
      first: groups that get curves first if not all can have them.

    Returns:
      The curves, their largest number of points, and the number of groups without any.
    """
    of_groups, fine = tables(runs, groups.groups), (*FIRST, *metrics)
    count, size = len(groups.groups), 1
    longest = max((len(table.steps) for table in of_groups), default=0)
    before = None
    for points in POINTS:
        thin = min(points, longest), min(FINER * points, longest)
        # A lower bound on the size saves writing curves that cannot fit.
        size = NUMBER * sum(
            min(len(table.steps), thin[table.metric in fine])
            * (4 if len(table.values) > 1 else 1)
            for table in of_groups
        )
        if thin != before and size <= limit:
            drawn, before = curves(of_groups, points=points, fine=fine), thin
            if document.written(drawn) <= limit:
                return drawn, points, 0
    points, most = POINTS[-1], count * limit // (2 * size)
    chosen = _some(count, most=most, first=first)
    of_chosen = [table for table in of_groups if table.group in chosen]
    drawn = curves(of_chosen, points=points, fine=fine)
    return drawn, points, count - len(chosen)


def _some(count: int, *, most: int, first: Sequence[int]) -> set[int]:
    """About `most` of `count` numbers: those in `first`, then evenly spaced others."""
    chosen = {*dict.fromkeys(first[:most])}
    return chosen.union(thinned(count, points=max(2, most - len(chosen))))


def _first(metrics: Sequence[str], drawn: Mapping[str, Json]) -> list[str]:
    known = drawn["metrics"]
    if metrics:
        return [name for name in metrics if name in known]
    chosen = [name for name in FIRST if name in known]
    return (chosen or sorted(known))[:SHOWN]


def _glossary(drawn: Mapping[str, Json]) -> dict[str, dict[str, str]]:
    entries = glossary.read()
    names = sorted(drawn["metrics"])
    shown = {name: glossary.entry_of(name, entries=entries) for name in names}
    return {name: entry._asdict() for name, entry in shown.items() if entry.text}


def _record(
    run: Run, *, group: int, rows: Sequence[Mapping[str, Json]]
) -> dict[str, Json]:
    verdict = verdicts.verdict(run.rows, alarms=run.alarms)
    summary = {} if run.summary is None else run.summary
    last = {
        name: _last([row[name] for row in run.rows if row.get(name) is not None])
        for name in (verdicts.SCORE, verdicts.JUDGE, KL, "drift/relative")
        if verdicts.series(run.rows, name)
    }
    timings = run.timings
    timed = [row for row in timings if row["stage"] == run.stage]
    return {
        "name": run.name,
        "group": group,
        "seed": run.config.get("seed"),
        "stage": run.stage,
        "steps": run.metrics[-1]["step"] + 1,
        "done": run.summary is not None,
        "damaged": bool(run.faults),
        "last": last,
        "gold": finite(summary.get("gold_policy")),
        "verdict": verdict._asdict(),
        "alarms": run.alarms,
        "tokens": samples.common_tokens(rows),
        "reference": {
            name: summary.get(f"reference_{name}", summary.get(f"teacher_{name}"))
            for name in ("fingerprint", "verified")
        },
        "phases": _phases(timed),
        "seconds": round(sum(map(_seconds, timings)), 1),
    }


def _last(values: Sequence[Json]) -> float | None:
    """The last value for a table; None if it is not finite, whatever came before."""
    value = finite(values[-1])
    return None if value is None else finite(float(f"{value:.5g}"))


def _phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of each phase per step, without the first step, which compiles.

    Time outside of all phases is "other".
    """
    rows = rows[1:] or rows
    if not rows:
        return {}
    names = list(dict.fromkeys(name for row in rows for name in row.get("phases", {})))
    sums = {
        name: sum(finite(row.get("phases", {}).get(name)) or 0.0 for row in rows)
        for name in names
    }
    waits = [row["waits"] for row in rows if "waits" in row]
    if waits:  # the sampler waits in parallel to the step, not within it
        sums["waiting for rollouts"] = sum(
            finite(wait.get("trainer")) or 0.0 for wait in waits
        )
    sums["other"] = sum(map(_seconds, rows)) - sum(sums.values())
    return {name: round(value / len(rows), 4) for name, value in sums.items()}


def _seconds(row: Mapping[str, Any]) -> float:
    return finite(row.get("seconds")) or 0.0


def _shared_out(
    rows: Sequence[Sequence[dict[str, Json]]], *, size: int, first: Sequence[int]
) -> list[list[dict[str, Json]]]:
    """The rows of each run that fit if all runs share `size` bytes evenly.

    Bytes that runs with few rows leave are shared among the others. If there is room
    for fewer runs than FEWEST bytes each, those in `first` have rows, and others evenly
    spaced.
    """
    few = _some(len(rows), most=size // FEWEST, first=first)
    rows = [of_run if n in few else [] for n, of_run in enumerate(rows)]
    costs = [sum(document.written(row) + 2 for row in of_run) for of_run in rows]
    shares = [0] * len(rows)
    left, open_ = size, sorted(range(len(rows)), key=lambda number: costs[number])
    for at, number in enumerate(open_):
        shares[number] = min(costs[number], left // (len(open_) - at))
        left -= shares[number]
    return [
        samples.within(of_run, size=share)
        for of_run, share in zip(rows, shares, strict=True)
    ]
