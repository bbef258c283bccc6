"""The sums of a run folder's files, and the check that the files still match them.

Every snapshot has the sums of its stage's rows so far, of config.json and of data.json
(`FILES` in its meta). summary.json has the sums of all files at the end. Files of a
snapshot and of an exported model are covered by the sums of their lists instead
(`snapshots.integrity` and `exported`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import lock
from rlhf_jax.runs.proof import sums
from rlhf_jax.runs.proof.sums import Sum
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.runs.snapshots.integrity import LIST
from rlhf_jax.runs.unfinished import SET_ASIDE, UNFINISHED

FILES = "files"  # key in a snapshot's meta
SUMMARY = "summary.json"
OPTIONS = ("config.json", "data.json")  # written at the start of a run
MANIFEST = ".sha256"  # beside an exported model: model.sha256
ROWS = ".jsonl"
Meta = Mapping[str, Any]  # of a snapshot


class Checked(NamedTuple):
    """The outcome of checking a folder."""

    whole: int  # number of files that match their sums
    faults: list[str]
    unproven: list[str]  # files and rows that should have a sum, and have none
    later: list[str]  # written after the newest snapshot of a run under way
    added: list[str]  # files added since the end of the run; not a fault


def sealed(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a summary with the sums of all files of its run.

    Rows that differ from those of their stage's newest snapshot, as after
    --accept-lost-rows, are recorded as doubts.
    """
    newest = resume.newest_metas(folder).items()
    doubts = [
        fault
        for stage, (step, meta) in newest
        for fault in _of_rows(folder, stage=stage, step=step, meta=meta, only=None)
    ]
    files = sums.of_files(folder, [*_present(folder, of_others=False)])
    return sums.sealed(summary, files=files, doubts=doubts)


def check(folder: Path, *, only: Collection[str] | None = None) -> Checked:
    """Compares the files of a run folder with their recorded sums.

    Args:
      only: names of the files to check, without snapshots; None checks everything.
    """
    faults: list[str] = []
    unproven: list[str] = []
    later: list[str] = []
    added: list[str] = []
    proof, whole = None, 0
    if is_over := (folder / SUMMARY).exists():
        try:
            proof = sums.opened(folder / SUMMARY)
        except (OSError, ValueError) as error:
            faults.append(f"{SUMMARY}: {error}")
    newest: Mapping[str, tuple[int, Meta]] = {}
    if proof is None or only is None:
        # Only the newest: after --accept-lost-rows older ones no longer match.
        newest = resume.newest_metas(folder, having=FILES)
    if proof is not None:
        files: dict[str, Sum] = proof["files"]
        expected = {n: of for n, of in files.items() if only is None or n in only}
        faults += sums.differences(expected, sums.of_files(folder, [*expected]))
        unproven += proof.get("doubts", [])
        whole = 1 + len(expected)
        if only is None:
            added = [name for name in _present(folder) if name not in files]
    elif newest:
        if is_over and not faults:
            faults.append(f"{SUMMARY}: expected its proof, got none")
        unproven, later = _since(folder, newest, only=only)
    elif is_over or resume.newest_metas(folder):
        unproven.append("written by a version without sums of files")
    else:
        later.append("no snapshot is complete yet")
    for stage, (step, meta) in newest.items():
        of_rows = _of_rows(folder, stage=stage, step=step, meta=meta, only=only)
        faults += [fault for fault in of_rows if fault not in unproven]
    faults = sorted(set(faults))
    return Checked(max(0, whole - len(faults)), faults, unproven, later, added)


def require(folder: Path, *, only: Collection[str], instead: str) -> list[str]:
    """Refuses to read files that are not those that the run wrote.

    Returns:
      `Checked.unproven`.

    Raises:
      InputError: files are damaged; the message names them and ends with `instead`.
    """
    checked = check(folder, only=only)
    if checked.faults:
        raise InputError(
            f"{folder}: expected the files that the run wrote, got\n"
            f"{checks.listed(checked.faults)}\n{instead}"
        )
    return checked.unproven


def _of_rows(
    folder: Path,
    *,
    stage: str,
    step: int,
    meta: Meta,
    only: Collection[str] | None,
) -> Iterator[str]:
    """Faults of a stage's rows, compared with one of its snapshots."""
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


def _since(
    folder: Path,
    newest: Mapping[str, tuple[int, Meta]],
    *,
    only: Collection[str] | None,
) -> tuple[list[str], list[str]]:
    """Files that changed since the newest snapshots of a run, and files with more rows.

    `newest` is {stage: (step, meta)}.
    """
    changed, later = [], []
    saved = [meta[FILES] for _, meta in newest.values()]
    names = dict.fromkeys(name for files in saved for name in files)
    for name in (name for name in names if only is None or name in only):
        of = [files[name] for files in saved if name in files]
        now = sums.of_files(folder, [name]).get(name, [0])
        more = now[0] - sum(size for size, _ in of)
        if name.endswith(ROWS) and more > 0:
            later.append(f"{name}: {more} bytes after the newest snapshot")
        elif not name.endswith(ROWS) and now not in of:
            changed.append(f"{name}: changed since the newest snapshot")
    return changed, later


def _present(folder: Path, *, of_others: bool = True) -> Iterator[str]:
    """Names of the files whose sums a summary records.

    Runs inside of the folder may be under way, and have summaries of their own: without
    `of_others` their files are left out.
    """
    others = {path.parent for path in folder.glob("*/**/metrics.jsonl")}
    for path in sorted(folder.rglob("*")):
        if not of_others and not others.isdisjoint(path.parents):
            continue
        parts = path.relative_to(folder).parts
        if parts[0] == "snapshots" and len(parts) > 3 and parts[3:] != (LIST,):
            listed = folder.joinpath(*parts[:3], LIST).exists()
        else:
            listed = len(parts) > 1 and (folder / f"{parts[0]}{MANIFEST}").exists()
        # Not snapshots set aside, which users may delete.
        aside = any(SET_ASIDE in part for part in parts[2:3])
        if path.name == lock.NAME or path.name.endswith(UNFINISHED):
            continue
        if parts == (SUMMARY,) or listed or aside:
            continue
        if path.is_file():
            yield "/".join(parts)
