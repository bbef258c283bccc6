"""What a run folder says of its own files, and whether they still are so.

Every snapshot has the sums of the rows of its stage so far, of config.json and of
data.json (`FILES` of its meta), and summary.json the sums of all files at the end. The
files of a snapshot have a list of their own (`snapshots.integrity`), and an exported
model its manifest (`exported`): of these the lists count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.proof import sums
from rlhf_jax.runs.proof.sums import Sum
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.runs.snapshots.integrity import LIST

FILES = "files"  # key in a snapshot's meta
SUMMARY = "summary.json"
OPTIONS = ("config.json", "data.json")  # what a run writes as it begins
MANIFEST = ".sha256"  # beside an exported model: model.sha256
LOCK = "run.lock"
UNFINISHED = ".tmp"  # as `folder.write_text` names what a kill may leave
ASIDE = ".set-aside"  # as `snapshots.SET_ASIDE`
ROWS = ".jsonl"
Meta = Mapping[str, Any]  # of a snapshot


class Checked(NamedTuple):
    """What the check of a folder came to."""

    whole: int  # files that are what was written
    faults: list[str]
    unproven: list[str]  # what should be vouched for, and is not
    later: list[str]  # what has come after the newest snapshot of a run under way
    added: list[
        str
    ]  # files that have come since it ended: no fault, and not vouched for


def sealed(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with the sums of all files of its run.

    Rows that are no longer those of the newest snapshot of their stage stand there as
    doubts, as of a run that went on with --accept-lost-rows.
    """
    newest = resume.newest_metas(folder).items()
    doubts = [
        fault
        for stage, (step, meta) in newest
        for fault in _of_rows(folder, stage=stage, step=step, meta=meta, only=None)
    ]
    files = sums.of_files(folder, [*_present(folder)])
    return sums.sealed(summary, files=files, doubts=doubts)


def check(folder: Path, *, only: Collection[str] | None = None) -> Checked:
    """Compares the files of a run folder with what it says of them.

    Args:
      only: names of files, without the snapshots; None is all that is there.
    """
    faults: list[str] = []
    unproven: list[str] = []
    later: list[str] = []
    added: list[str] = []
    proof = None
    if is_over := (folder / SUMMARY).exists():
        try:
            proof = sums.opened(folder / SUMMARY)
        except (OSError, ValueError) as error:
            faults.append(f"{SUMMARY}: {error}")
    metas: list[tuple[str, int, Meta]] = []
    if proof is None or only is None:
        # The newest alone: a run that went on with --accept-lost-rows keeps older ones.
        metas = [
            (stage.name, *newest)
            for stage in sorted((folder / "snapshots").glob("*"))
            for newest in [(s, m) for s, m in resume.metas(stage) if FILES in m][:1]
        ]
    expected: dict[str, Sum] = {}
    if proof is not None:
        files: dict[str, Sum] = proof["files"]
        expected = {n: of for n, of in files.items() if only is None or n in only}
        unproven += proof.get("doubts", [])
        if only is None:
            added = [name for name in _present(folder) if name not in files]
    elif not metas and not is_over and not resume.newest_metas(folder):
        later.append("no snapshot is complete yet")
    elif not metas:
        unproven.append("a version that kept no sums of its files wrote it")
    elif is_over and not faults:
        faults.append(f"{SUMMARY}: expected its proof, got none")
    faults += sums.differences(expected, sums.of_files(folder, [*expected]))
    for stage, step, meta in metas:
        of_rows = _of_rows(folder, stage=stage, step=step, meta=meta, only=only)
        faults += [fault for fault in of_rows if fault not in unproven]
    if proof is None:
        _so_far(folder, metas, only=only, unproven=unproven, later=later)
    faults = sorted(set(faults))
    whole = len(expected) + (proof is not None)
    return Checked(max(0, whole - len(faults)), faults, unproven, later, added)


def require(folder: Path, *, only: Collection[str], instead: str) -> list[str]:
    """Refuses files that a number is to be computed from and that are damaged.

    Returns:
      `Checked.unproven`.

    Raises:
      InputError: names what is not what the run wrote.
    """
    checked = check(folder, only=only)
    if checked.faults:
        raise InputError(
            f"{folder}: expected the files that the run wrote, got\n"
            f"{checks.listed(checked.faults)}\n{instead}"
        )
    return checked.unproven


def of_options(folder: Path) -> dict[str, Sum]:
    """The sums of what a run writes as it begins."""
    return sums.of_files(folder, OPTIONS)


def _of_rows(
    folder: Path,
    *,
    stage: str,
    step: int,
    meta: Meta,
    only: Collection[str] | None,
) -> Iterator[str]:
    """How the rows of a stage contradict one of its snapshots."""
    expected = {
        name: of
        for name, of in meta.get(FILES, {}).items()
        if name.endswith(ROWS) and (only is None or name in only)
    }
    now = {
        name: sums.of_rows(folder / name, stage=stage, size=of[0]).now()
        for name, of in expected.items()
    }
    for fault in sums.differences(expected, now):
        name, _, what = fault.partition(": ")
        yield f"{name}, rows up to snapshot {step} of {stage}: {what}"


def _so_far(
    folder: Path,
    metas: Sequence[tuple[str, int, Meta]],
    *,
    only: Collection[str] | None,
    unproven: list[str],
    later: list[str],
) -> None:
    """Adds what no snapshot vouches for, of a run that has not come to its end.

    Args:
      metas: of the newest snapshot of each stage.
    """
    newest = {stage: meta[FILES] for stage, _, meta in metas}
    names = dict.fromkeys(name for files in newest.values() for name in files)
    for name in (name for name in names if only is None or name in only):
        of = [files[name] for files in newest.values() if name in files]
        now = sums.of_files(folder, [name]).get(name, [0])
        more = now[0] - sum(size for size, _ in of)
        if name.endswith(ROWS) and more > 0:
            later.append(f"{name}: {more} bytes after the newest snapshot")
        elif not name.endswith(ROWS) and now not in of:
            unproven.append(f"{name}: other than at the newest snapshot")


def _present(folder: Path) -> Iterator[str]:
    """Names of the files that a summary has the sums of."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if parts[0] == "snapshots" and len(parts) > 3 and parts[3:] != (LIST,):
            listed = folder.joinpath(*parts[:3], LIST).exists()
        else:
            listed = len(parts) > 1 and (folder / f"{parts[0]}{MANIFEST}").exists()
        # Users are told to delete a snapshot that is set aside.
        aside = any(ASIDE in part for part in parts[2:3])
        if path.name == LOCK or path.name.endswith(UNFINISHED):
            continue
        if parts == (SUMMARY,) or listed or aside:
            continue
        if path.is_file():
            yield "/".join(parts)
