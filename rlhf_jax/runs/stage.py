"""One stage of a run: it restores its state, and records and saves its steps.

A stage begins at its newest snapshot, at an older one, or at its start.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax

from rlhf_jax.devices import processes, program_cache
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.runs import command_line, folder, metrics, receipt
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.runs.profile import HOST_SCOPE, Masks
from rlhf_jax.runs.proof import run_files, sums
from rlhf_jax.runs.proof.sums import Sum
from rlhf_jax.runs.run_config import to_json
from rlhf_jax.runs.snapshots import files, jsonl, proof, resume
from rlhf_jax.runs.snapshots.integrity import DamagedError
from rlhf_jax.runs.snapshots.snapshots import Snapshots

if TYPE_CHECKING:
    from rlhf_jax.runs.run import Run

PyTree = Any
Meta = Mapping[str, Any]  # of a snapshot
MAX_SKIPPED = 5  # updates in a row without a finite gradient that stop a run
# The metrics that count skipped updates, and what the message adds about each. The
# second one counts those of the critic.
SKIPPED = {
    "update/skipped_in_a_row": (
        "so nothing was updated in these steps. Snapshots hold the state before them"
    ),
    "critic/skipped_in_a_row": (
        "in the critic, which was not updated in these steps, while the policy was. "
        "Snapshots before the first critic/skipped in metrics.jsonl have both whole"
    ),
}


def _seconds(path: Path, *, stage: str) -> float:
    """Seconds of a stage's steps in timings.jsonl."""
    rows = [row for row in metrics.read(path) if row["stage"] == stage]
    return math.fsum(metrics.finite(row.get("seconds")) or 0.0 for row in rows)


class DivergedError(StopError):
    """Several updates in a row had no finite gradient."""


def check_divergence(
    row: Mapping[str, float | None], *, step: int, newest: int | None
) -> None:
    """Stops a run if a row of metrics.jsonl says that its last updates were skipped.

    The message names `step` and `newest`, the run's newest snapshot.

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
    """Returns the state with each `Future` replaced by its result, once it is done.

    Raises the exception of a future that failed.
    """
    return jax.tree.map(
        lambda leaf: leaf.result() if isinstance(leaf, Future) else leaf, state
    )


def is_settled(state: PyTree) -> bool:
    """Returns whether `settled` would neither wait nor raise."""
    futures = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, Future)]
    return all(future.done() and future.exception() is None for future in futures)


class Stage:
    """One stage of a run; leaving the context manager closes its snapshots."""

    def __init__(
        self,
        run: Run,
        name: str,
        state: PyTree,
        *,
        meta: Meta,
        frozen: proof.Proof,
    ) -> None:
        processes.agree(f"the data of {name}", json.dumps(meta, sort_keys=True))
        self._run, self._name, self._frozen = run, name, frozen
        self._num_steps = run.num_steps[name]
        config = to_json(run.config)
        self._meta = {**meta, "config": config, "versions": run.versions}
        self._folder = run.folder / "snapshots" / name
        sync = mirror.syncing(run.folder)
        keep = run.config.keep_snapshots
        self._snapshots = Snapshots(self._folder, keep=keep, then=sync)
        self.state, self.start = state, 0
        saved = self._begin(meta)
        self._whole = self._copy(self.start)
        if self.steps():  # the snapshot is taken, so these versions make its next steps
            used = run.versions
            processes.on_first(lambda: folder.record_versions(run.folder, used))
        self._options: dict[str, Sum] = {}
        if processes.is_first():
            self._options = sums.of_files(run.folder, run_files.OPTIONS)
        of_files = saved.get(run_files.FILES, {})
        if not run.began_data:
            self._check_data(of_files)
        rows = saved.get(jsonl.ROWS)
        run.record.begin(name, step=self.start, rows=rows, sums_of_rows=of_files)
        if processes.is_first():
            run.seconds_before += _seconds(run.folder / "timings.jsonl", stage=name)
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
        """Encloses code that may hang or fail, such as a reward or a judge.

        `stop_timeout` seconds after a signal, the state before the step is saved and
        the process ends with status 128 + the signal's number; a resume repeats the
        step. It is saved as well if the code fails. The arrays of that state must not
        be donated inside.
        """
        limit = contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            if self._run.deadline is not None:
                stack.push(self._save_at_failure)
                limit = self._run.deadline.limit(self._save_whole)
            stack.enter_context(limit)
            stack.enter_context(jax.profiler.TraceAnnotation(HOST_SCOPE))
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
        """Records a step, and saves if a snapshot is due or a signal asks for a stop.

        Args:
          stats, positions, waits: arguments of `metrics.Recorder.write`.
          samples: rows for samples.jsonl.
          texts: (segments or mask [B, S], response tokens [B, S]) of each batch that
            the step read; only a profile reads them, for its tokens and FLOPs.

        Raises:
          DivergedError: `MAX_SKIPPED` updates in a row were skipped, of all models or
            of the critic alone; earlier snapshots are kept.
          metrics.AlarmError: an alarm stops the run; everything is saved.
          command_line.Interrupted: a signal asked for a stop; everything is saved.
        """
        record, config = self._run.record, self._run.config
        profiler = self._run.profiler
        if profiler is not None:
            profiler.end_step(step, texts)
        if step == self.start:
            # The first step has compiled every program of a step.
            program_cache.give_back_memory()
        alarm: metrics.AlarmError | None = None
        row: dict[str, Any] = {"positions": positions, "waits": waits}
        try:
            record.write(step, stats, **row)
        except metrics.AlarmError as raised:  # of the step before, whose row is written
            alarm = raised
            record.write(step, stats, **row)
        record.write_samples(step, samples)
        done = step + 1
        self._whole = self._copy(done)
        stop = self._run.vote(self._run.interrupt.requested)
        due = stop or done == self._num_steps or done % config.snapshot_every == 0
        due = due or alarm is not None
        if due:
            try:
                record.flush()
            except metrics.AlarmError as raised:
                alarm = alarm or raised
        check_divergence(record.latest, step=step, newest=self._snapshots.latest())
        if due:
            with self.user_code():  # rollouts under way may hang, too
                state = settled(self.state)
            self._save(done, state)
        if alarm is not None:
            how = command_line.go_on(config).replace("\n ", "")
            alarm.args = (f"{alarm}; saved, {how}",)
            raise alarm
        if stop:
            self._run.interrupt.stop()
        if profiler is not None:
            profiler.begin_step(self._name, done)

    def _save(self, done: int, state: PyTree) -> None:
        meta = {**self._meta, proof.META: self._frozen.check(state)}
        # Copied, because the snapshot is written while the next steps run.
        meta[jsonl.ROWS] = dict(self._run.record.rows)
        meta[run_files.FILES] = self._options | self._run.record.sums
        self._snapshots.save(done, arrays=state, meta=meta)

    def _copy(self, done: int) -> tuple[int, PyTree]:
        """(number of steps done, the present state in a tree that no step changes)."""
        if self._run.deadline is None:
            return done, None
        return done, jax.tree.map(lambda leaf: leaf, self.state)

    def _save_rows(self) -> None:
        """Writes all rows; the run stops anyway, whatever alarm the last one raises."""
        with contextlib.suppress(metrics.AlarmError):
            self._run.record.flush()

    def _save_at_failure(self, kind: type[BaseException] | None, *_: object) -> None:
        """Saves the state before this step if the user's code raised an exception."""
        done, state = self._whole
        if kind is None or not issubclass(kind, Exception) or done == self.start:
            return
        if not is_settled(state):
            return
        with contextlib.suppress(Exception):  # the code's own exception is the one told
            self._save_rows()
            self._save(done, settled(state))
            self._snapshots.wait()
            saved = f"note: step {done} failed; saved as of step {done}; "
            print(f"{saved}{command_line.go_on(self._run.config)}", file=sys.stderr)

    def _save_whole(self, signum: int) -> str:
        """Saves the state before this step, from another thread; returns a message."""
        done, state = self._whole
        saved = "no step was done yet"
        if done and not is_settled(state):
            saved = "its rollouts are not drawn; earlier snapshots are kept"
        elif done:
            saved = f"saved as of step {done}"
            self._save_rows()
            self._save(done, settled(state))
            self._snapshots.close()
        limit, config = self._run.deadline, self._run.config
        assert limit is not None  # the deadline calls this method
        signal_name = signal.Signals(signum).name
        return (
            f"stopped: step {done} did not come through its sampler, reward or judge "
            f"within {limit.seconds:g} s of {signal_name} (--stop-timeout); "
            f"{saved}; {command_line.go_on(config)}"
        )

    def _begin(self, meta: Meta) -> Meta:
        """Restores the state from a snapshot, or begins with that of the start.

        Returns:
          The meta of the snapshot, {} at the start.
        """
        newest, back = self._snapshots.latest() or 0, self._run.resume_from
        if back is not None and (newest == 0 or self._run.is_newest(self._name)):
            return self._go_back(back, meta)
        if newest == 0:
            self._frozen.check(self.state)
            return {}
        try:
            saved = self._restore(newest, meta)
        except DamagedError as damage:
            if back is None:
                raise DamagedError(f"{damage}\n{self._way_back(newest)}") from None
            return self._go_back(back, meta)
        if saved.get(run_files.FILES):  # older versions saved no sums of files
            self._snapshots.complete(newest)
        return saved

    def _go_back(self, step: int, meta: Meta) -> Meta:
        """Begins at an older snapshot, or 0 for the start; sets newer ones aside."""
        steps = (0, *self._snapshots.steps())
        checks.one_of(
            among=steps, **{f"--resume-from, a snapshot of {self._name}": step}
        )
        saved: Meta = {}
        if step == 0:
            self._frozen.check(self.state)
        else:
            saved = self._restore(step, meta)
        for path in self._snapshots.set_aside(after=step):
            print(
                f"note: {self._name} goes on from snapshot {step}; a newer one is set "
                f"aside as {path}, delete it when it is of no more use",
                file=sys.stderr,
            )
        self._run.resume_from = None
        return saved

    def _restore(self, step: int, meta: Meta) -> Meta:
        """Restores a snapshot, if it has this meta and these frozen models."""
        arrays, saved = self._snapshots.restore(step, like=self.state)
        where = f"snapshot {step} of {self._name}"
        resume.check_meta(saved, meta, where=where)
        self._frozen.check_resumed(saved[proof.META], arrays, where=where)
        self.state, self.start = arrays, step
        return saved

    def _way_back(self, newest: int) -> str:
        """Says which older snapshot to resume from, if the newest is damaged."""
        for step in reversed([n for n in self._snapshots.steps() if n < newest]):
            checked = files.check(self._folder, step)
            if checked.damage is None:
                return (
                    f"snapshot {step} of {self._name} is {checked.verdict}: go on from "
                    f"it with --resume-from {step} instead of --resume; what came "
                    f"after it is computed again, with the same numbers"
                )
        return (
            f"no older snapshot of {self._name} is whole: start the stage again with "
            f"--resume-from 0 instead of --resume"
        )

    def _check_data(self, saved: Mapping[str, Sum]) -> None:
        """Raises InputError if data.json is not that of the snapshot's sums."""
        name, now = receipt.NAME, self._options
        if name in now and saved.get(name, now[name]) != now[name]:
            raise InputError(
                f"{self._run.folder / name}: expected the file that snapshot "
                f"{self.start} was saved with, got another; put it back, or remove it "
                f"to have it written again"
            )
