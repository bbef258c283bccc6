"""`rlhf-jax verify`: whether a run, sweep or exported model is as it was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import tyro

from rlhf_jax.devices import processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import StopError
from rlhf_jax.roles.reference.frozen import ReferenceMovedError
from rlhf_jax.runs import command_line, report
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.proof import exported, run_files
from rlhf_jax.runs.proof.run_files import MANIFEST, Checked
from rlhf_jax.runs.snapshots import files, integrity, proof, resume
from rlhf_jax.sweeps import planned, results

SHOWN = 12  # digits of a fingerprint, so that a table fits 80 columns


class Outcome(NamedTuple):
    """The result of checking a run, a sweep's own files or a model."""

    files: Checked
    snapshots: int
    damaged: list[str]  # a message for each snapshot
    moved: list[str]  # a message for each frozen model


def verify(run: tyro.conf.Positional[Path]) -> None:
    """Check that a run, a sweep or an exported model is as it was written.

    Args:
      run: Folder of a run, of a sweep, or of a model, as RUN/model; or its
        gs://BUCKET/NAME or s3://BUCKET/NAME.

    Raises:
      StopError: a file or snapshot is damaged, or cannot be read.
      ReferenceMovedError: a frozen model moved, other than by its lifecycle; the
        message names the leaves.
    """
    processes.check_platform()
    run = urls.fetched(run)
    try:
        outcomes = dict(_all(run))
    except OSError as error:
        raise StopError(
            f"{run!s:.200}: expected files that can be read, got {error.strerror}: "
            f"{error.filename!s:.200}; see to their permissions"
        ) from error
    for name, (of_files, *_) in outcomes.items():
        for why in of_files.later:
            print(f"since the newest proof, {name}: {why}")
        for why in of_files.unproven:
            print(f"not proven, {name}: {why}")
        if of_files.added:
            print(
                f"added after {name} ended, not part of the proof:\n"
                f"{checks.listed(_by_folder(name, of_files.added))}"
            )
    damaged = [
        f"{name} is damaged: expected what was written, got\n{checks.listed(of.faults)}"
        for name, (of, *_) in outcomes.items()
        if of.faults
    ]
    damaged += [message for one in outcomes.values() for message in one.damaged]
    moved = [message for one in outcomes.values() for message in one.moved]
    if damaged:
        raise StopError("\n".join(damaged + moved))
    if moved:
        raise ReferenceMovedError("\n".join(moved))
    whole = sum(one.files.whole for one in outcomes.values())
    count = sum(one.snapshots for one in outcomes.values())
    print(
        f"{whole} {'file' if whole == 1 else 'files'} and {count} "
        f"{'snapshot' if count == 1 else 'snapshots'} checked, none damaged"
    )


def _by_folder(place: Path, added: Sequence[str]) -> list[str]:
    """Lists added files; a folder of added files is one entry, "wandb/ (9 files)"."""
    tops = Counter(name.partition("/")[0] for name in added if "/" in name)
    for top in [*tops]:
        if tops[top] != sum(path.is_file() for path in (place / top).rglob("*")):
            del tops[top]
    others = [name for name in added if name.partition("/")[0] not in tops]
    return [*(f"{top}/ ({n} file{'s' * (n > 1)})" for top, n in tops.items()), *others]


def _all(place: Path) -> Iterator[tuple[Path, Outcome]]:
    """Yields the outcome of each run, sweep or model at a path."""
    if exported.has_manifest(place):
        yield place, Outcome(exported.check(place), 0, [], [])
    elif (place / planned.BEGUN).is_file():
        yield place, Outcome(results.check(place), 0, [], [])
        for run in sorted(filter(Path.is_dir, place.glob("runs/*/*"))):
            yield run, _of_run(run)
    else:
        if not (place / run_files.SUMMARY).exists():
            proof.stages(place)  # raises if this is no run
        yield place, _of_run(place)


def _of_run(run: Path) -> Outcome:
    """Checks files, exported models, snapshots and frozen models; prints tables."""
    has_snapshots = any((run / "snapshots").glob("*/*"))
    of_files = run_files.check(run)
    if not (run / run_files.SUMMARY).exists():
        print(
            f"{run} has no {run_files.SUMMARY}: it has not ended, or that file is "
            f"lost; only what its snapshots hold the sums of is checked"
        )
    for path in sorted(run.glob(f"*{MANIFEST}")):
        model = path.with_suffix("")
        proven = (run / run_files.SUMMARY).exists() and path.name not in of_files.added
        if not path.is_file() or not (proven or model.is_dir()):
            continue  # a file of the user that only has this name
        of_model = exported.check(model)
        of_files = of_files._replace(
            whole=of_files.whole + of_model.whole,
            faults=of_files.faults + of_model.faults,
            added=of_files.added + of_model.added,
        )
    for path in sorted((run / "snapshots").glob("*/*")):
        if path.is_dir() and not path.name.isdecimal():  # set aside
            name = path.relative_to(run)
            of_files.faults.extend(
                f"{name}: {fault}" for fault in integrity.faults_of_files(path)
            )
    checked = {
        (stage.name, step): files.check(stage, step)
        for stage in (proof.stages(run) if has_snapshots else ())
        for step in resume.steps(stage)
    }
    of_files.added.extend(
        f"snapshots/{stage}/{step}/{name}"
        for (stage, step), check in checked.items()
        for name in check.added
    )
    damaged = {name: check.damage for name, check in checked.items() if check.damage}
    rows = proof.check_run(run, skipped=damaged) if has_snapshots else []
    if checked:
        report.table(
            f"Snapshots in {run}",
            ("stage", "step", "arrays", "verdict"),
            [(*name, check.arrays, check.verdict) for name, check in checked.items()],
        )
    if rows:
        report.table(
            f"Frozen models in {run}",
            ("stage", "step", "model", "fingerprint", "leaves", "verdict"),
            [row._replace(fingerprint=row.fingerprint[:SHOWN])[:-1] for row in rows],
        )
        print(f"{len(rows)} verified, none moved" * all(r.moved is None for r in rows))
    moved = [
        f"{row.stage}, snapshot {row.step}, {row.model}: {row.moved}"
        for row in rows
        if row.moved is not None
    ]
    return Outcome(of_files, len(checked), [*map(str, damaged.values())], moved)


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax verify`: runs the check from a command line."""
    command_line.call(verify, prog="rlhf-jax verify", args=argv)
