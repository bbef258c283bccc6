"""Where a stage begins: at its newest snapshot, at an older one, or at its start."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.functional import checks
from rlhf_jax.runs.snapshots import files, proof, resume
from rlhf_jax.runs.snapshots.integrity import DamagedError
from rlhf_jax.runs.snapshots.snapshots import Snapshots

PyTree = Any
ROWS = "rows"  # key in a snapshot's meta: how many rows each file of the record has


class Beginning(NamedTuple):
    """What a stage goes on from."""

    step: int  # number of the snapshot, 0 for the start of the stage
    state: PyTree
    rows: Mapping[str, int] | None  # of each JSONL file; None if they are not known
    went_back: bool = False  # to an older snapshot, as the user asked


def begin(
    name: str,
    state: PyTree,
    *,
    snapshots: Snapshots,
    folder: Path,
    meta: Mapping[str, Any],
    frozen: proof.Proof,
    resume_from: int | None,
    is_newest_stage: bool,
) -> Beginning:
    """Restores a stage from its snapshots, or begins it with its `state`.

    The meta must equal that of the snapshot, and the frozen models are verified.

    Args:
      resume_from: the snapshot to go back to, 0 for the start of the stage; None takes
        the newest one.
      is_newest_stage: whether no later stage has a snapshot.

    Raises:
      InputError: there is no such snapshot, or it has another meta.
      ReferenceMovedError: a frozen model is not what was frozen.
      DamagedError: the newest snapshot is damaged, and `resume_from` is None. The
        message names the newest one that is whole.
    """

    def restored(step: int, *, went_back: bool) -> Beginning:
        arrays, saved = snapshots.restore(step, like=state)
        where = f"snapshot {step} of {name}"
        resume.check_meta(saved, meta, where=where)
        frozen.check_resumed(saved[proof.META], arrays, where=where)
        return Beginning(step, arrays, saved.get(ROWS), went_back)

    def gone_back(step: int) -> Beginning:
        steps = (0, *snapshots.steps())
        checks.one_of(among=steps, **{f"--resume-from, a snapshot of {name}": step})
        if step == 0:
            frozen.check(state)
            beginning = Beginning(0, state, None, went_back=True)
        else:
            beginning = restored(step, went_back=True)
        for path in snapshots.set_aside(after=step):
            print(
                f"note: {name} goes on from snapshot {step}; a newer one is set aside "
                f"as {path}, delete it when it is of no more use",
                file=sys.stderr,
            )
        return beginning

    newest = snapshots.latest() or 0
    if resume_from is not None and (newest == 0 or is_newest_stage):
        return gone_back(resume_from)
    if newest == 0:
        frozen.check(state)
        return Beginning(0, state, None)
    try:
        return restored(newest, went_back=False)
    except DamagedError as damage:
        if resume_from is None:
            way_back = _way_back(name, snapshots, folder, newest=newest)
            raise DamagedError(f"{damage}\n{way_back}") from None
        return gone_back(resume_from)


def _way_back(name: str, snapshots: Snapshots, folder: Path, *, newest: int) -> str:
    """Which older snapshot to go on from, for the message about a damaged one."""
    for step in reversed([n for n in snapshots.steps() if n < newest]):
        checked = files.check(folder, step)
        if checked.damage is None:
            return (
                f"snapshot {step} of {name} is {checked.verdict}: go on from it "
                f"with --resume-from {step} instead of --resume; what came after "
                f"it is computed again, with the same numbers"
            )
    return (
        f"no older snapshot of {name} is whole: start the stage again with "
        f"--resume-from 0 instead of --resume"
    )
