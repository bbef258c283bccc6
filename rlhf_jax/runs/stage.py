"""One stage of a run: where it begins, and the ends of its steps.

It begins at its newest snapshot, at an older one, or at its start.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax

from rlhf_jax.devices import processes, program_cache
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.runs import command_line, receipt
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.runs.profile import HOST_SCOPE, Masks
from rlhf_jax.runs.proof import run_files
from rlhf_jax.runs.proof.sums import Sum
from rlhf_jax.runs.run_config import to_json
from rlhf_jax.runs.snapshots import files, proof, resume
from rlhf_jax.runs.snapshots.integrity import DamagedError
from rlhf_jax.runs.snapshots.snapshots import Snapshots

if TYPE_CHECKING:
    from rlhf_jax.runs.run import Run

PyTree = Any
MAX_SKIPPED = 5  # updates in a row without a finite gradient, before a run stops
# The metrics that count skipped updates, and what a message adds about each; the second
# one belongs to the critic.
SKIPPED = {
    "update/skipped_in_a_row": (
        "and nothing was updated meanwhile. The snapshots hold what was before"
    ),
    "critic/skipped_in_a_row": (
        "of the critic's, which was not updated meanwhile, though the policy was. "
        "Snapshots of before the first critic/skipped in metrics.jsonl have both whole"
    ),
}
ROWS = "rows"  # key in a snapshot's meta: how many rows each file of the record has


class DivergedError(StopError):
    """Several updates in a row had no finite gradient."""


def check_divergence(
    row: Mapping[str, float | None], *, step: int, newest: int | None
) -> None:
    """Stops a run whose last updates were all skipped, by a row of metrics.jsonl.

    The message names the step of the run and its newest snapshot.

    Raises:
      DivergedError: at least `MAX_SKIPPED` updates in a row had no finite gradient.
    """
    for name, reason in SKIPPED.items():
        skipped = row.get(name)
        if skipped is not None and skipped >= MAX_SKIPPED:
            raise DivergedError(
                f"by step {step} the gradient was not finite {skipped:.0f} times "
                f"in a row, {reason} (newest: {newest}); look for "
                f"NaN in the rewards, or start again with a smaller learning rate"
            )


def settled(state: PyTree) -> PyTree:
    """The state with the result of each `Future` in its place, waiting for it.

    Raises whatever the work behind a future raised.
    """
    return jax.tree.map(
        lambda leaf: leaf.result() if isinstance(leaf, Future) else leaf, state
    )


def is_settled(state: PyTree) -> bool:
    """Whether `settled` would not wait, and would not raise."""
    futures = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, Future)]
    return all(future.done() and future.exception() is None for future in futures)


class Stage:
    """One stage of a run; a context manager that closes its snapshots."""

    def __init__(
        self,
        run: Run,
        name: str,
        state: PyTree,
        *,
        meta: Mapping[str, Any],
        frozen: proof.Proof,
    ) -> None:
        processes.agree(f"the data of {name}", json.dumps(meta, sort_keys=True))
        self._run = run
        self._frozen = frozen
        self._num_steps = run.num_steps[name]
        config = to_json(run.config)
        self._meta = {**meta, "config": config, "versions": run.versions}
        self._name = name
        folder = run.folder / "snapshots" / name
        sync = mirror.syncing(run.folder)
        keep = run.config.keep_snapshots
        self._snapshots = Snapshots(folder, keep=keep, then=sync)
        begun = begin(
            name,
            state,
            snapshots=self._snapshots,
            folder=folder,
            meta=meta,
            frozen=frozen,
            resume_from=run.resume_from,
            is_newest_stage=run.is_newest(name),
        )
        if begun.went_back:
            run.resume_from = None
        self.state, self.start = begun.state, begun.step
        self._whole = self._copy(self.start)
        self._options: dict[str, Sum] = {}
        if processes.is_first():
            self._options = run_files.of_options(run.folder)
        of_files = begun.files
        if not run.began_data:
            check_data(run.folder, self._options, of_files, snapshot=self.start)
        run.record.begin(name, step=self.start, rows=begun.rows, sums_of_rows=of_files)
        sync()

    def __enter__(self) -> Self:
        if self._run.profiler is not None:
            self._run.profiler.begin_stage(self._name, self.start)
        return self

    def __exit__(self, *exception: object) -> None:
        self._snapshots.close()

    def steps(self) -> range:
        """The steps that are left."""
        return range(self.start, self._num_steps)

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Around what may hang, as a reward or a judge, with a state that is whole.

        `stop_timeout` after a signal the state from before the step is saved and the
        process ends, with status 128 + the signal's number; a resume repeats the step.
        """
        limit = contextlib.nullcontext()
        if self._run.deadline is not None:
            limit = self._run.deadline.limit(self._save_whole)
        with limit, jax.profiler.TraceAnnotation(HOST_SCOPE):
            yield

    def end_step(
        self,
        step: int,
        stats: Stats,
        samples: Sequence[Mapping[str, Any]] = (),
        *,
        positions: Stats | None = None,
        texts: Sequence[Masks] = (),
        waits: Mapping[str, float] | None = None,
    ) -> None:
        """Records a step, and saves when it is time or a signal asks for it.

        Args:
          stats, positions, waits: of `metrics.Recorder.write`.
          samples: rows for samples.jsonl.
          texts: what the step read, (segments or mask [B, S], response tokens [B, S])
            of each batch; for the tokens and FLOPs of a profile, and read for it alone.

        Raises:
          DivergedError: `MAX_SKIPPED` updates in a row were skipped, of all or of the
            critic alone; the snapshots before them stay.
          cli.Interrupted: after a signal, with everything saved.
        """
        record, config = self._run.record, self._run.config
        profiler = self._run.profiler
        if profiler is not None:
            profiler.end_step(step, texts)
        if step == self.start:
            # Whatever a step compiles it has compiled by now.
            program_cache.give_back_memory()
        record.write(step, stats, positions=positions, waits=waits)
        record.write_samples(step, samples)
        done = step + 1
        self._whole = self._copy(done)
        stop = self._run.vote(self._run.interrupt.requested)
        due = stop or done == self._num_steps or done % config.snapshot_every == 0
        if due:
            record.flush()
        check_divergence(record.latest, step=step, newest=self._snapshots.latest())
        if due:
            with self.user_code():  # rollouts that are still to come may hang, too
                state = settled(self.state)
            self._save(done, state)
        if stop:
            self._run.interrupt.stop()
        if profiler is not None:
            profiler.begin_step(self._name, done)

    def _save(self, done: int, state: PyTree) -> None:
        meta = {**self._meta, proof.META: self._frozen.check(state)}
        # A copy, as the snapshot is written while the next steps run.
        meta[ROWS] = dict(self._run.record.rows)
        meta[run_files.FILES] = self._options | self._run.record.sums
        self._snapshots.save(done, arrays=state, meta=meta)

    def _copy(self, done: int) -> tuple[int, PyTree]:
        """The arrays of the state as it is now, in a tree that no step changes."""
        if self._run.deadline is None:
            return done, None
        return done, jax.tree.map(lambda leaf: leaf, self.state)

    def _save_whole(self, signum: int) -> str:
        """Saves the state from before this step, in another thread; what to tell."""
        done, state = self._whole
        saved = "no step was done yet"
        if done and not is_settled(state):
            saved = "its rollouts are not drawn; the snapshots before stay"
        elif done:
            saved = f"saved as of step {done}"
            self._run.record.flush()
            self._save(done, settled(state))
            self._snapshots.close()
        limit, config = self._run.deadline, self._run.config
        assert limit is not None  # as it calls this
        signal_name = signal.Signals(signum).name
        return (
            f"stopped: step {done} did not come through its sampler, reward or judge "
            f"within {limit.seconds:g} s of {signal_name} (--stop-timeout); "
            f"{saved}; {command_line.go_on(config)}"
        )


class Beginning(NamedTuple):
    """What a stage goes on from."""

    step: int  # number of the snapshot, 0 for the start of the stage
    state: PyTree
    rows: Mapping[str, int] | None  # of each JSONL file; None if they are not known
    went_back: bool = False  # to an older snapshot, as the user asked
    files: Mapping[str, Sum] = {}  # sums of files; empty if they are not known


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
        files = saved.get(run_files.FILES, {})
        if files and not went_back:  # of a version that has lists
            snapshots.complete(step)
        return Beginning(step, arrays, saved.get(ROWS), went_back, files)

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


def check_data(
    folder: Path, now: Mapping[str, Sum], saved: Mapping[str, Sum], *, snapshot: int
) -> None:
    """Checks that data.json, which says how a run began, is what it was.

    Args:
      now, saved: sums of files, of this process's start and in the snapshot.

    Raises:
      InputError: it is another.
    """
    name = receipt.NAME
    if name in now and saved.get(name, now[name]) != now[name]:
        raise InputError(
            f"{folder / name}: expected the file that snapshot {snapshot} was saved "
            f"with, got another; put it back, or remove it, and it is written anew"
        )


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
