"""A run on disk: stages that save, stop and resume to the last bit.

    with run.Run(config, num_steps={"sft": 300, "ppo": 100}) as job:
        with job.stage("sft", state, meta={}) as stage:
            for step in stage.steps():
                stage.state, stats = update(stage.state, batch=batches[step])
                stage.end_step(step, stats)
        ...

The experiment writes the loop. A stage restores its state before the first step and
saves it at intervals. A stage that was complete when the run stopped restores its last
snapshot and has no steps left, so a pipeline resumes where it stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Self

import jax

from rlhf_jax.devices import processes
from rlhf_jax.functional.errors import refuse
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import alarms, command_line, lock, metrics, receipt
from rlhf_jax.runs.folder import code_of, open_run, versions
from rlhf_jax.runs.metrics import Sink
from rlhf_jax.runs.profile import Window
from rlhf_jax.runs.progress import Progress
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.runs.snapshots import proof, resume
from rlhf_jax.runs.stage import Stage
from rlhf_jax.runs.stops import Deadline

if TYPE_CHECKING:
    from rlhf_jax.runs.profile.profiler import Profiler

PyTree = Any


class Run:
    """An open run folder: its lock, the record, the signals, the stages' snapshots."""

    def __init__(
        self,
        config: RunConfig,
        *,
        num_steps: Mapping[str, int],
        check: alarms.Check | None = None,
        stops: Callable[[str], bool] | None = None,
        stop_timeout: float | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes or continues `config.out`.

        Args:
          num_steps: {stage: number of steps}, in the order of the stages; empty for a
            program without steps.
          check, stops: arguments of `metrics.Recorder`, such as `alarms.check` with
            its limits bound, and `alarms.Limits.stops`.
          stop_timeout: seconds after a signal at which a step inside (or later
            entering) `Stage.user_code` is abandoned. None waits for the step; runs of
            several processes always wait, since they save together.
          data: the result of `Receipts.to_json`, which is printed and written to
            data.json; None for a program that reads no data.

        Raises:
          InputError: a stage has no steps, the last stage lacks the steps of
            `profile`, the package of a logger cannot be imported, stop_timeout is not
            positive, another process writes to the folder, or the folder cannot be
            used (`folder.open_run`).
        """
        for stage, steps in num_steps.items():
            done = resume.newest(config.out / "snapshots" / stage)
            if steps < max(done, 1):
                least = f"the {done} steps that its newest snapshot has"
                refuse(
                    [
                        f"{stage}: expected at least {least if done else '1 step'}, "
                        f"got {steps}; give as many, or more"
                    ]
                )
        profiled = None
        if config.profile is not None:
            profiled = Window.parse(config.profile)
            profiled.check([0, *num_steps.values()][-1])
        if processes.is_first() and config.loggers:
            from rlhf_jax.runs import loggers  # few runs need it

            loggers.check(config)
        self.deadline = None
        if stop_timeout is not None and jax.process_count() == 1:
            self.deadline = Deadline(stop_timeout)
        self.config = config
        self.num_steps = num_steps
        self._lock = contextlib.ExitStack()
        processes.on_first(lambda: self._lock.enter_context(lock.hold(config.out)))
        with contextlib.ExitStack() as undone:
            undone.push(self._lock)
            self.folder = open_run(config)
            # A resumed run has no data.json where the user removed a damaged one.
            self.began_data = not (self.folder / receipt.NAME).exists()
            if data is not None:
                receipt.write(self.folder, data)
                receipt.tell(data)
            self.record = metrics.Recorder(
                self.folder,
                sinks=sinks(config, num_steps=num_steps),
                check=check,
                stops=stops,
                accept_lost_rows=config.accept_lost_rows,
            )
            undone.pop_all()
        self.seconds_before = 0.0  # of steps that earlier starts of this run made
        self.profiler: Profiler | None = None
        if profiled is not None:
            from rlhf_jax.runs.profile.profiler import Profiler  # few runs need it

            self.profiler = Profiler(
                self.folder,
                stage=next(reversed(list(num_steps)), ""),
                window=profiled,
                paused=self.record.paused,
            )
        self.versions = versions() | code_of(config)
        self.resume_from = config.resume_from  # None once a stage has gone back to it
        self.interrupt = command_line.Interrupt(
            on_request=None if self.deadline is None else self.deadline.on_signal
        )
        self.vote = processes.Vote()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as entered:
            # Exits run in reverse order. If entering fails, all that is open is closed.
            entered.push(self._lock)
            entered.enter_context(self.interrupt)
            entered.push(self.record)
            if self.profiler is not None:
                entered.callback(self.profiler.close)
            if self.deadline is not None:
                entered.enter_context(self.deadline)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)
        if exception[0] is None:
            processes.wait()  # until the first process has written everything

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """All alarms raised, for the summary: stage, name, first step and message.

        The list is complete once the run is closed, since rows are read one step late.
        """
        return [
            {"stage": stage, **alarm._asdict()}
            for stage, raised in self.record.alarms.items()
            for alarm in raised
        ]

    def is_newest(self, name: str) -> bool:
        """Whether no stage after this one has a snapshot."""
        order = list(self.num_steps)
        later = order[order.index(name) + 1 :]
        return not any(resume.newest(self.folder / "snapshots" / one) for one in later)

    def stage(
        self,
        name: str,
        state: PyTree,
        *,
        meta: Mapping[str, Any],
        beside: Mapping[str, Frozen] | None = None,
        moving: Collection[str] = (),
    ) -> Stage:
        """Opens the stage `name` at its newest snapshot, or at `state` without one.

        Every `Frozen` model in or `beside` the state is verified at the start, before
        every snapshot and at the end. The meta of each snapshot has their fingerprints,
        which stay those of the stage's start unless the model is in `moving`.

        Args:
          state: pytree of all arrays that the stage changes or must save. Later a leaf
            may be a `Future` of arrays, which a snapshot waits for.
          meta: JSON values that must be equal when the stage is resumed.
          beside, moving: arguments of `proof.Proof`.

        Raises:
          InputError: a snapshot belongs to another model, or was saved with another
            meta or other frozen models.
          ReferenceMovedError: a frozen model in a snapshot is not what was frozen.
          DamagedError: the newest snapshot is damaged, and the config has no
            `resume_from`; the message names the newest one that is whole.
        """
        frozen = proof.Proof(state, beside=beside or {}, moving=moving)
        return Stage(self, name, state, meta=meta, frozen=frozen)


def sinks(config: RunConfig, *, num_steps: Mapping[str, int]) -> list[Sink]:
    """Opens the sinks of `metrics.Recorder` that a config asks for.

    `num_steps` is {stage: number of steps}. Only the first process has sinks.
    """
    if not processes.is_first():
        return []
    chosen: list[Sink] = [Progress(num_steps)] if config.progress else []
    if config.loggers:
        from rlhf_jax.runs import loggers  # few runs need it

        chosen += loggers.chosen(config)
    return chosen
