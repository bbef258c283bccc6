"""Where the runs of a sweep are started: on this machine, or on a cluster's."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.sweeps import tied, worker
from rlhf_jax.sweeps.planned import Planned

BETWEEN = 1.0  # seconds between looks at a job that is to end
BETWEEN_ANSWERS = 0.05  # seconds between looks at a worker that is to end its run
LEAVING = 5.0  # seconds that a process may take to end after its last run


class Process(Protocol):
    """A run under way; a `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Its exit status once it has ended, -N of signal N."""

    def terminate(self) -> None:
        """Asks it to save and stop."""

    def wait(self) -> int:
        """Waits for its end."""
        ...


class Launcher(Protocol):
    """What starts runs."""

    def start(self, run: Planned) -> Process:
        """Starts a run, whose output goes to its log."""
        ...

    def close(self) -> None:
        """Ends what it keeps after all runs have ended, where it keeps anything."""


class Local(Launcher):
    """A process of this machine for each run, which is killed when the sweep is.

    It is in a session of its own: Ctrl-C comes to the sweep, which lets it save.
    """

    def start(self, run: Planned) -> Process:
        """Starts a run, whose output goes to its log."""
        return _process(run, tie=_tie(), own_session=True)


class Workers(Launcher):
    """Processes of this machine that stay from run to run (`worker`).

    Runs of one process share its compiled programs. As with `Local`, they are killed
    when the sweep is, and Ctrl-C comes to the sweep alone. One that is full
    (`worker.full`) is replaced.
    """

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._leaving: list[_Worker] = []  # full; a run may have left threads in one

    def start(self, run: Planned) -> Process:
        """Gives a run to a process that is idle, or to a new one."""
        run.log.parent.mkdir(parents=True, exist_ok=True)
        while self._idle:
            chosen = self._idle.pop()
            try:
                chosen.give(run)
            except BrokenPipeError:  # something has ended it since its last run
                chosen.end()
            else:
                return chosen
        chosen = _Worker(self._idle, self._leaving, log=run.log)
        chosen.give(run)
        return chosen

    def close(self) -> None:
        """Ends the processes, whose runs have ended."""
        for idle in self._idle:
            idle.end()
        self._idle.clear()
        for leaving in self._leaving:
            leaving.end(within=LEAVING)
        self._leaving.clear()


class _Worker:
    """A process that stays; a `Process` of the run that it was given last."""

    def __init__(
        self, idle: list[_Worker], leaving: list[_Worker], *, log: Path
    ) -> None:
        """Starts it.

        It puts itself in `idle` when its run has ended, in `leaving` if that was its
        last. The log is for what is printed before its first run.
        """
        self._idle, self._leaving = idle, leaving
        self._status: int | None = None
        reading, writing = os.pipe()
        with log.open("ab") as printed:
            self._process = subprocess.Popen(
                [*_tie(), sys.executable, "-P", "-m", worker.__name__, str(writing)],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                start_new_session=True,
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def give(self, run: Planned) -> None:
        """Has it do a run, while it does none."""
        assert self._process.stdin is not None
        self._status = None
        log = str(run.log.resolve())
        line = {"module": run.module, "argv": run.arguments(), "log": log}
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def poll(self) -> int | None:
        if self._status is None:
            answered = bool(select.select([self._answers], [], [], 0)[0])
            if answered or self._process.poll() is not None:
                self._take(answered)
        return self._status

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(BETWEEN_ANSWERS)
        return status

    def _take(self, answered: bool) -> None:
        """Takes its answer, or its end where the run took the process with it."""
        line = self._answers.readline() if answered else ""
        if not line:
            self._status = self.end()
            return
        status, *last = line.split()
        self._status = int(status)
        (self._leaving if worker.LAST in last else self._idle).append(self)

    def end(self, *, within: float | None = None) -> int:
        """Lets it end, or kills it after so many seconds; its exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of what it has not taken
            self._process.stdin.close()
        self._answers.close()
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Submitit(Launcher):
    """A job of Slurm for each run, through `submitit`.

    Jobs outlive a sweep that is killed; start it again when they have ended. One that
    comes to its time limit has failed, and goes on when the sweep is started again.
    """

    def __init__(
        self, folder: Path, *, parameters: Mapping[str, Any], cluster: str = "slurm"
    ) -> None:
        """Starts nothing yet.

        Args:
          folder: for the files of jobs, which all machines see.
          parameters: of `submitit.AutoExecutor.update_parameters`, as
            {"timeout_min": 60, "gpus_per_node": 1, "slurm_partition": "long"}.
          cluster: "slurm", or "local" for processes that stand for jobs.
        """
        try:
            import submitit

            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**parameters)
        except Exception as error:  # of several kinds, and NameError among them
            raise InputError(
                f"--launcher slurm: expected the package submitit, a cluster and its "
                f"parameters, got: {error}; pip install 'rlhf-jax[slurm]', start it "
                f"where sbatch is, and see [slurm] of the file"
            ) from error

    def start(self, run: Planned) -> Process:
        """Submits a run, whose output goes to its log.

        Raises:
          StopError: the cluster takes no job.
        """
        try:
            return _Job(self._executor.submit(_as_job, run))
        except Exception as error:
            raise StopError(
                f"--launcher slurm: expected a job of {run.name} to be taken, got: "
                f"{error}; see to [slurm] of the file, and start the sweep again"
            ) from error


class _Job:
    """A job as a process."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def poll(self) -> int | None:
        return self.wait() if self._job.done() else None

    def terminate(self) -> None:
        self._job.cancel(check=False)

    def wait(self) -> int:
        while not self._job.done():
            time.sleep(BETWEEN)
        try:
            return int(self._job.result())
        except Exception:  # it was cancelled, or its machine was lost
            return 1


def _as_job(run: Planned) -> int:
    """In the job, whose signals come to the run too: the run's exit status."""
    return _process(run).wait()


def _tie() -> tuple[str, ...]:
    """What has a command killed when this process is."""
    return (sys.executable, "-P", "-m", tied.__name__, str(os.getpid()))


def _process(
    run: Planned, *, tie: Sequence[str] = (), own_session: bool = False
) -> subprocess.Popen[bytes]:
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [*tie, *run.command()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )
