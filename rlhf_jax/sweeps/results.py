"""The results of a sweep: every measure of every cell, differences, and claims."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, lock, parsing, report
from rlhf_jax.runs.proof import run_files, sums
from rlhf_jax.runs.proof.run_files import Checked
from rlhf_jax.runs.unfinished import UNFINISHED
from rlhf_jax.sweeps import claims, measures, statistics
from rlhf_jax.sweeps.claims import Answered, Numbers
from rlhf_jax.sweeps.declaration import Cell, Sweep
from rlhf_jax.sweeps.planned import BEGUN, Planned
from rlhf_jax.sweeps.statistics import Estimate, Interval

NAME = "results.json"
# Files of a run from which its numbers, and the facts of a paper, are read.
READ = (*run_files.OPTIONS, run_files.SUMMARY, "metrics.jsonl", "timings.jsonl")


class Results(NamedTuple):
    """The numbers of all finished runs."""

    # {measure: {cell: {seed: value}}}
    values: Mapping[str, Mapping[Cell, Numbers]]
    absent: list[str]  # messages about measures that no run has
    answers: dict[str, tuple[str, Answered]]  # {name: (claim, answer)}
    notes: Sequence[str] = ()  # about runs without sums, or with fewer numbers


def check_claims(sweep: Sweep) -> None:
    """Checks before the first run that every claim can be evaluated."""
    nothing = {name: {cell: {} for cell in sweep.cells} for name in sweep.measures}
    lookup = claims.lookup_in(sweep.cells, nothing)
    for claim in sweep.claims.values():
        claims.answer(claim, lookup=lookup)


def collected(sweep: Sweep, planned: Sequence[Planned]) -> Results:
    """Collects the numbers of the finished runs among those of `planned.runs_of`."""
    done = [run for run in planned if run.done]
    notes = checked(done)
    absent = []
    if done:
        folders = [run.folder for run in done]
        absent = measures.absent(sweep.measures, runs=folders)
        notes += measures.doubts(sweep.measures, runs=folders)
        notes += mixed(folders)
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
    return Results(values, absent, answers, notes)


def mixed(runs: Sequence[Path]) -> list[str]:
    """Returns a note for each version, or reward's code, that differs between runs."""
    versions: list[Mapping[str, Any]] = []
    for run in runs:
        with contextlib.suppress(InputError):  # a user's own program may record none
            versions.append(folder.recorded(run / folder.CONFIG)["versions"])
    counts = {
        name: collections.Counter(str(one.get(name, "none")) for one in versions)
        for name in dict.fromkeys(name for one in versions for name in one)
    }
    return [
        f"{name} is not the same in all runs: "
        + "; ".join(f"{value} in {count}" for value, count in of.most_common(3))
        + (f"; and {len(of) - 3} others" if len(of) > 3 else "")
        for name, of in counts.items()
        if len(of) > 1
    ]


def checked(done: Sequence[Planned]) -> list[str]:
    """Refuses finished runs whose files are damaged.

    Returns:
      A message about runs without sums of their files, such as those of older versions.
    """
    unproven = [
        run.name
        for run in done
        if run_files.require(
            run.folder,
            only=READ,
            instead="put them back, or remove the folder and give the command of the "
            "sweep again, which runs it again; rlhf-jax verify checks all runs",
        )
    ]
    if not unproven:
        return []
    return [
        f"{len(unproven)} of {len(done)} runs have files without recorded sums, "
        f"{unproven[0]} first; rlhf-jax verify says why"
    ]


def seal(out: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Adds to results.json the sums of the sweep's files and of its runs' summaries."""
    return sums.sealed(document, files=sums.of_files(out, _names(out)))


def seal_again(out: Path) -> None:
    """Updates the sums in results.json with later files, such as figures."""
    if (out / NAME).exists():
        require(out, ("runs/", "logs/"))  # not figures, which may be new
        folder.write_json(out / NAME, seal(out, _read(out)))


def require(out: Path, beginnings: tuple[str, ...]) -> None:
    """Refuses a sweep whose files differ from the sums in results.json or are missing.

    Args:
      beginnings: prefixes of the names of the files to check.

    Raises:
      InputError: files are damaged; the message names them.
    """
    try:
        proof = sums.opened(out / NAME) if (out / NAME).exists() else None
        files = {} if proof is None else proof["files"]
        files = {name: of for name, of in files.items() if name.startswith(beginnings)}
        faults = [*sums.differences(files, sums.of_files(out, [*files]))]
    except ValueError as error:
        faults = [f"{NAME}: {error}"]
    if faults:
        raise InputError(
            f"{out}: expected the files that the sweep wrote, got\n"
            f"{checks.listed(faults)}\ngive the command of the sweep again"
        )


def unseal(out: Path) -> None:
    """Removes the sums from results.json, if it exists, since more runs follow."""
    if (out / NAME).exists():
        with contextlib.suppress(InputError):  # damaged; it is rewritten at the end
            folder.write_json(out / NAME, _read(out))


def _read(out: Path) -> dict[str, Any]:
    document = parsing.read_object(
        out / NAME,
        expected="the results of a sweep",
        advice="give the command of the sweep again",
    )
    return {name: value for name, value in document.items() if name != sums.PROOF}


def check(out: Path) -> Checked:
    """Compares the files of a sweep, other than those of runs, with results.json."""
    faults: list[str] = []
    proofs: dict[str, Any] = {}
    for name in (BEGUN, NAME):
        try:
            if (out / name).exists():
                proofs[name] = sums.opened(out / name)
        except (OSError, ValueError) as error:
            faults.append(f"{name}: {error}")
    proof = proofs.get(NAME)
    if proof is None:
        why = f"{NAME}: missing or without sums, as after a start that was stopped"
        return Checked(len(proofs), faults, [] if faults else [why], [], [])
    files = proof["files"]
    other = [*sums.differences(files, sums.of_files(out, [*files]))]
    added = [name for name in _names(out) if name not in files]
    under_way = (out / lock.NAME).exists()
    whole = max(0, len(proofs) + len(files) - len(other))
    later = other * under_way
    return Checked(whole, faults + other * (not under_way), [], later, added)


def _names(out: Path) -> list[str]:
    """The files of a sweep; of its runs only summaries, which prove the others."""
    names = [path.relative_to(out) for path in sorted(out.rglob("*")) if path.is_file()]
    return [
        name.as_posix()
        for name in names
        if (name.parts[0] != "runs" or name.parts[3:] in ((), (run_files.SUMMARY,)))
        and name.parts not in ((BEGUN,), (NAME,), (lock.NAME,))
        and not name.name.endswith(UNFINISHED)
    ]


def as_json(sweep: Sweep, results: Results) -> dict[str, Any]:
    """Returns results.json: values by seed, estimates, differences and claims.

    Differences are from the first cell, paired by seed.
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
    """Prints a table of each measure, and a table of the claims."""
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
    """Returns values - others, for the seeds of both."""
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
