"""A run on disk: stages that save, stop and go on to the last bit.

    with run.Run(config, num_steps={"sft": 300, "ppo": 100}) as job:
        with job.stage("sft", state, meta={}) as stage:
            for step in stage.steps():
                stage.state, stats = update(stage.state, batch=batches[step])
                stage.end_step(step, stats)
        ...

The loop is the experiment's own; a stage only restores its state before the first step
and keeps it after each. A stage that was complete when the run stopped restores its
last snapshot and has no steps left, so a pipeline goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from rlhf_jax.devices import processes, program_cache
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import alarms, command_line, deadline, lock, metrics, report
from rlhf_jax.runs.folder import open_run, versions
from rlhf_jax.runs.run_config import RunConfig, to_json
from rlhf_jax.runs.snapshots import files, proof, resume, snapshots
from rlhf_jax.runs.snapshots.integrity import DamagedError

PyTree = Any
ROWS = "rows"  # key in a snapshot's meta: how many each file of the record has
MAX_SKIPPED = 5  # updates in a row without a finite gradient, before a run stops
# Metrics that count them, and what is to be said; the second is a critic's own.
SKIPPED = {
    "update/skipped_in_a_row": (
        "and nothing was updated meanwhile. The snapshots hold what was before"
    ),
    "critic/skipped_in_a_row": (
        "of the critic's, which was not updated meanwhile, though the policy was. "
        "Snapshots of before the first critic/skipped in metrics.jsonl have both whole"
    ),
}


class DivergedError(StopError):
    """Several updates in a row had no finite gradient."""


class Run:
    """An open run folder: its lock, the record, the signals, the stages' snapshots."""

    def __init__(
        self,
        config: RunConfig,
        *,
        num_steps: Mapping[str, int],
        check: alarms.Check | None = None,
        stop_timeout: float | None = None,
    ) -> None:
        """Makes or continues `config.out`.

        Args:
          num_steps: of each stage, in order.
          check: decides on alarms from a stage's rows, as `alarms.check` does with its
            limits bound; None raises none.
          stop_timeout: seconds after a signal; a step that is in `Stage.user_code`
            then, or comes to it later, is given up. None waits for it, and so do
            several processes, which save together.

        Raises:
          InputError: a stage has no steps, stop_timeout is no time, another process
            writes the folder, or it cannot be used (`folder.open_run`).
        """
        for stage, steps in num_steps.items():
            if steps < 1:
                raise InputError(f"{stage}: expected at least 1 step, got {steps}")
            done = resume.newest(config.out / "snapshots" / stage)
            if steps < done:
                raise InputError(
                    f"{stage}: expected at least the {done} steps that its newest "
                    f"snapshot has, got {steps}; give as many, or more"
                )
        self.deadline = None
        if stop_timeout is not None and jax.process_count() == 1:
            self.deadline = deadline.Deadline(stop_timeout)
        self.config = config
        self.num_steps = num_steps
        self._lock = contextlib.ExitStack()
        processes.on_first(lambda: self._lock.enter_context(lock.hold(config.out)))
        with contextlib.ExitStack() as undone:
            undone.push(self._lock)
            self.folder = open_run(config)
            self.record = metrics.Recorder(
                self.folder,
                sinks=report.sinks(config, num_steps=num_steps),
                check=check,
                accept_lost_rows=config.accept_lost_rows,
            )
            undone.pop_all()
        self.versions = versions()
        self.resume_from = config.resume_from  # None once a stage has gone back to it
        self.interrupt = command_line.Interrupt(
            on_request=None if self.deadline is None else self.deadline.asked
        )
        self.vote = processes.Vote()

    def __enter__(self) -> Self:
        self.interrupt.__enter__()
        if self.deadline is not None:
            self.deadline.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.deadline is not None:
            self.deadline.__exit__(*exception)
        with self._lock:
            try:
                self.record.__exit__(*exception)
            finally:
                self.interrupt.__exit__(*exception)
        if exception[0] is None:
            processes.wait()  # for the first to have written everything

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """All alarms raised, for the summary: stage, name, first step and message.

        Whole once the run is closed, since rows are read a step late.
        """
        return [
            {"stage": stage, **alarm._asdict()}
            for stage, raised in self.record.alarms.items()
            for alarm in raised
        ]

    def is_newest(self, name: str) -> bool:
        """Whether no stage after this one has a snapshot."""
        order = list(self.num_steps)
        folders = [
            self.folder / "snapshots" / later
            for later in order[order.index(name) + 1 :]
        ]
        return not any(files.numbers(folder) for folder in folders if folder.exists())

    def stage(
        self,
        name: str,
        state: PyTree,
        *,
        meta: Mapping[str, Any],
        beside: Mapping[str, Frozen] | None = None,
        moving: Collection[str] = (),
    ) -> Stage:
        """The stage `name`, at its newest snapshot or else at `state`.

        Every `Frozen` in the state, and those `beside` it, is verified at the start,
        before every snapshot and so at the end; their fingerprints stand in the meta
        of each snapshot, and must be those the stage began with unless `moving`.

        Args:
          state: pytree of arrays, all that the stage changes or must not lose.
          meta: JSON values that must be equal when the stage is resumed, as the
            reference's fingerprint.
          beside: frozen models by name that the stage reads and its state does not
            hold, as the reward model.
          moving: names of those in the state that a lifecycle replaces.

        Raises:
          InputError: a snapshot is of another model, or its meta or the frozen models
            it began with differ.
          ReferenceMovedError: a frozen model in a snapshot is not what was frozen.
          DamagedError: the newest snapshot is damaged, and the config has no
            `resume_from`; names the newest one that is whole.
        """
        return Stage(
            self,
            name,
            state,
            meta=meta,
            frozen=proof.Proof(state, beside=beside or {}, moving=moving),
        )


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
        self._meta = {
            **meta,
            "config": to_json(run.config),
            "versions": run.versions,
        }
        self._snapshots = snapshots.Snapshots(
            run.folder / "snapshots" / name, keep=run.config.keep_snapshots
        )
        self.state = state
        self._rows: Mapping[str, int] | None = None  # by the snapshot that it is at
        self.start = self._begin(name, state, meta=meta)
        self._whole = self._kept(self.start)
        run.record.begin(name, step=self.start, rows=self._rows)

    def _begin(self, name: str, state: PyTree, *, meta: Mapping[str, Any]) -> int:
        """Restores `self.state`; the number of the snapshot, 0 for none."""
        run, newest = self._run, self._snapshots.latest() or 0
        back = run.resume_from
        if back is not None and (newest == 0 or run.is_newest(name)):
            return self._go_back(name, state, back, meta=meta)
        if newest == 0:
            self._frozen.check(self.state)
            return 0
        try:
            self._restore(name, state, newest, meta=meta)
        except DamagedError as damage:
            if back is None:
                raise DamagedError(
                    f"{damage}\n{self._way_back(name, newest)}"
                ) from None
            return self._go_back(name, state, back, meta=meta)
        return newest

    def _go_back(
        self, name: str, state: PyTree, step: int, *, meta: Mapping[str, Any]
    ) -> int:
        """Restores an older snapshot as the user asked, and sets the newer aside."""
        there = self._snapshots.steps()
        if step not in (0, *there):
            raise InputError(
                f"--resume-from: expected 0, the start of {name}, or one of its "
                f"snapshots {there}, got {step}; give one of them"
            )
        if step == 0:
            self._frozen.check(state)
        else:
            self._restore(name, state, step, meta=meta)
        self._run.resume_from = None
        for path in self._snapshots.set_aside(after=step):
            print(
                f"note: {name} goes on from snapshot {step}; a newer one is set aside "
                f"as {path}, delete it when it is of no more use",
                file=sys.stderr,
            )
        return step

    def _restore(
        self, name: str, state: PyTree, step: int, *, meta: Mapping[str, Any]
    ) -> None:
        restored, saved = self._snapshots.restore(step, like=state)
        where = f"snapshot {step} of {name}"
        resume.check_meta(saved, meta, where=where)
        self._frozen.check_resumed(saved[proof.META], restored, where=where)
        self.state, self._rows = restored, saved.get(ROWS)

    def _way_back(self, name: str, newest: int) -> str:
        """From which older snapshot to go on, instead of a newest that is damaged."""
        folder = self._run.folder / "snapshots" / name
        for step in reversed([n for n in self._snapshots.steps() if n < newest]):
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._snapshots.close()

    def steps(self) -> range:
        """The steps that are left."""
        return range(self.start, self._num_steps)

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Around a reward or a judge, which may hang, before the step changes arrays.

        `stop_timeout` after a signal the state from before the step is saved and the
        process ends, with status 128 + the signal's number; a resume repeats the step.
        """
        limit = contextlib.nullcontext()
        if self._run.deadline is not None:
            limit = self._run.deadline.limit(self._save_whole)
        with limit:
            yield

    def end_step(
        self,
        step: int,
        stats: Stats,
        samples: Sequence[Mapping[str, Any]] = (),
        *,
        positions: Stats | None = None,
    ) -> None:
        """Records a step, and saves when it is time or a signal asks for it.

        Args:
          stats: {name: (sum, weight)}; read one step late, so the device never waits.
          samples: rows for samples.jsonl.
          positions: {name: (sums, weights)} by position in the response, for
            positions.jsonl; read as late as stats.

        Raises:
          DivergedError: `MAX_SKIPPED` updates in a row were skipped, of all or of the
            critic alone; the snapshots before them stay.
          cli.Interrupted: after a signal, with everything saved.
        """
        record, config = self._run.record, self._run.config
        if step == self.start:
            # Whatever a step compiles it has compiled by now.
            program_cache.give_back_memory()
        record.write(step, stats, positions=positions)
        record.write_samples(step, samples)
        done = step + 1
        self._whole = self._kept(done)
        stop = self._run.vote(self._run.interrupt.requested)
        due = stop or done == self._num_steps or done % config.snapshot_every == 0
        if due:
            record.flush()
        for name, told in SKIPPED.items():
            skipped = record.latest.get(name)
            if skipped is not None and skipped >= MAX_SKIPPED:
                raise DivergedError(
                    f"by step {step} the gradient was not finite {skipped:.0f} times "
                    f"in a row, {told} (newest: {self._snapshots.latest()}); look for "
                    f"NaN in the rewards, or start again with a smaller learning rate"
                )
        if due:
            self._save(done, self.state)
        if stop:
            self._run.interrupt.stop()

    def _save(self, done: int, state: PyTree) -> None:
        meta = {**self._meta, proof.META: self._frozen.check(state)}
        meta[ROWS] = dict(self._run.record.rows)  # written behind the next steps
        self._snapshots.save(done, arrays=state, meta=meta)

    def _kept(self, done: int) -> tuple[int, PyTree]:
        """The arrays of the state as it is now, in a tree that no step changes."""
        if self._run.deadline is None:
            return done, None
        return done, jax.tree.map(lambda leaf: leaf, self.state)

    def _save_whole(self, signum: int) -> str:
        """Saves the state from before this step, in another thread; what to tell."""
        done, state = self._whole
        saved = "no step was done yet"
        if done:
            saved = f"saved as of step {done}"
            self._run.record.flush()
            self._save(done, state)
            self._snapshots.close()
        limit, config = self._run.deadline, self._run.config
        assert limit is not None  # as it calls this
        return (
            f"stopped: step {done} did not come through its reward or judge within "
            f"{limit.seconds:g} s of {signal.Signals(signum).name} (--stop-timeout); "
            f"{saved}; {command_line.go_on(config)}"
        )
