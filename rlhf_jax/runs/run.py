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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from rlhf_jax.devices import processes, program_cache
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import (
    alarms,
    command_line,
    deadline,
    divergence,
    lock,
    loggers,
    metrics,
    report,
)
from rlhf_jax.runs.folder import open_run, versions
from rlhf_jax.runs.profile import window
from rlhf_jax.runs.profile.profiler import Masks, Profiler
from rlhf_jax.runs.profile.trace import HOST_SCOPE
from rlhf_jax.runs.run_config import RunConfig, to_json
from rlhf_jax.runs.snapshots import (
    beginning,
    files,
    pending,
    proof,
    resume,
    snapshots,
)

PyTree = Any


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
          num_steps: of each stage, in order; none of a program without steps.
          check: decides on alarms from a stage's rows, as `alarms.check` does with its
            limits bound; None raises none.
          stop_timeout: seconds after a signal; a step that is in `Stage.user_code`
            then, or comes to it later, is given up. None waits for it, and so do
            several processes, which save together.

        Raises:
          InputError: a stage has no steps, or the last one not those of `profile`,
            which needs a stage; the package of a logger cannot be imported;
            stop_timeout is no time, another process writes the folder, or it cannot be
            used (`folder.open_run`).
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
        profiled = None
        if config.profile is not None:
            if not num_steps:
                raise InputError(
                    f"--profile {config.profile}: expected a program that trains step "
                    f"by step, got one without steps; leave --profile out"
                )
            profiled = window.parse(config.profile)
            profiled.check(list(num_steps.values())[-1])
        if processes.is_first():
            loggers.check(
                tensorboard=config.tensorboard,
                wandb=config.wandb,
                trackio=config.trackio,
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
        self.profiler = Profiler(
            self.folder,
            stage=next(reversed(list(num_steps)), ""),
            window=profiled,
            paused=self.record.paused,
        )
        self.versions = versions()
        self.resume_from = config.resume_from  # None once a stage has gone back to it
        self.interrupt = command_line.Interrupt(
            on_request=None if self.deadline is None else self.deadline.asked
        )
        self.vote = processes.Vote()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as entered:
            # Left in the opposite order. If entering fails, all that is open is closed.
            entered.push(self._lock)
            entered.enter_context(self.interrupt)
            entered.push(self.record)
            entered.callback(self.profiler.close)
            if self.deadline is not None:
                entered.enter_context(self.deadline)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)
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
          state: pytree of arrays, all that the stage changes or must not lose. Later
            a leaf may be a `Future` of arrays, which a snapshot waits for.
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
        self._name = name
        self._snapshots = snapshots.Snapshots(
            run.folder / "snapshots" / name, keep=run.config.keep_snapshots
        )
        begun = beginning.begin(
            name,
            state,
            snapshots=self._snapshots,
            folder=run.folder / "snapshots" / name,
            meta=meta,
            frozen=frozen,
            resume_from=run.resume_from,
            is_newest_stage=run.is_newest(name),
        )
        if begun.went_back:
            run.resume_from = None
        self.state, self.start = begun.state, begun.step
        self._whole = self._kept(self.start)
        run.record.begin(name, step=self.start, rows=begun.rows)

    def __enter__(self) -> Self:
        self._run.profiler.begin_stage(self._name, self.start)
        self._begin_step(self.start)
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
          stats: {name: (sum, weight)}; read one step late, so the device never waits.
          samples: rows for samples.jsonl.
          positions: {name: (sums, weights)} by position in the response, for
            positions.jsonl; read as late as stats.
          texts: what the step read, (segments or mask [B, S], response tokens [B, S])
            of each batch; for the tokens and FLOPs of a profile, and read for it alone.
          waits: seconds that each side of a queue waited for the other, for
            timings.jsonl; None is no queue.

        Raises:
          DivergedError: `MAX_SKIPPED` updates in a row were skipped, of all or of the
            critic alone; the snapshots before them stay.
          cli.Interrupted: after a signal, with everything saved.
        """
        record, config = self._run.record, self._run.config
        self._run.profiler.end_step(step, texts)
        if step == self.start:
            # Whatever a step compiles it has compiled by now.
            program_cache.give_back_memory()
        record.write(step, stats, positions=positions, waits=waits)
        record.write_samples(step, samples)
        done = step + 1
        self._whole = self._kept(done)
        stop = self._run.vote(self._run.interrupt.requested)
        due = stop or done == self._num_steps or done % config.snapshot_every == 0
        if due:
            record.flush()
        divergence.check(record.latest, step=step, newest=self._snapshots.latest())
        if due:
            with self.user_code():  # rollouts that are still to come may hang, too
                state = pending.settled(self.state)
            self._save(done, state)
        if stop:
            self._run.interrupt.stop()
        self._begin_step(done)

    def _begin_step(self, step: int) -> None:
        self._run.profiler.begin_step(self._name, step)

    def _save(self, done: int, state: PyTree) -> None:
        meta = {**self._meta, proof.META: self._frozen.check(state)}
        # A copy, as the snapshot is written while the next steps run.
        meta[beginning.ROWS] = dict(self._run.record.rows)
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
        if done and not pending.is_settled(state):
            saved = "its rollouts are not drawn; the snapshots before stay"
        elif done:
            saved = f"saved as of step {done}"
            self._run.record.flush()
            self._save(done, pending.settled(state))
            self._snapshots.close()
        limit, config = self._run.deadline, self._run.config
        assert limit is not None  # as it calls this
        asked = signal.Signals(signum).name
        return (
            f"stopped: step {done} did not come through its sampler, reward or judge "
            f"within {limit.seconds:g} s of {asked} (--stop-timeout); "
            f"{saved}; {command_line.go_on(config)}"
        )
