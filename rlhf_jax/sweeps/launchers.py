"""Launchers start the runs of a sweep, on this machine or on a cluster."""

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

BETWEEN = 1.0  # seconds between polls of a job
BETWEEN_ANSWERS = 0.05  # seconds between polls of a worker
LEAVING = 5.0  # seconds that a worker may take to end after its last run


class Process(Protocol):
    """A run under way; a `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Returns the exit status, -N for signal N; None while it runs."""

    def terminate(self) -> None:
        """Asks it to save and stop."""

    def wait(self) -> int:
        """Waits for its end, and returns the exit status."""
        ...


class Launcher(Protocol):
    """Starts runs."""

    def start(self, run: Planned) -> Process:
        """Starts a run, whose output goes to its log."""
        ...

    def close(self) -> None:
        """Ends processes that it keeps, after all runs have ended."""


class Local(Launcher):
    """Starts one local process per run, which is killed if the sweep is killed.

    Each process has its own session, so Ctrl-C reaches only the sweep, which lets the
    run save.
    """

    def start(self, run: Planned) -> Process:
        """Starts a run, whose output goes to its log."""
        return _process(run, tie=_tie(), own_session=True)


class Workers(Launcher):
    """Keeps local processes from run to run (`worker`).

    Runs in one process share its compiled programs. As with `Local`, processes are
    killed with the sweep, and Ctrl-C reaches only the sweep. A full process
    (`worker.full`) is replaced.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def start(self, run: Planned) -> Process:
        """Gives a run to an idle process, or to a new one."""
        run.log.parent.mkdir(parents=True, exist_ok=True)
        for kept in [one for one in self._workers if one.idle]:
            try:
                kept.give(run)
            except BrokenPipeError:  # the process has ended since its last run
                kept.end()
            else:
                return kept
        self._workers.append(_Worker(log=run.log))
        self._workers[-1].give(run)
        return self._workers[-1]

    def close(self) -> None:
        """Ends all processes, after their runs have ended."""
        for one in self._workers:
            one.end(within=LEAVING if one.full else None)


class _Worker:
    """A process that is kept; as a `Process` it stands for its latest run."""

    def __init__(self, *, log: Path) -> None:
        """Starts the process; `log` takes the output before the first run."""
        self.idle = True  # and can take a run
        self.full = False  # and ends; threads of a run may delay that
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
        """Gives the idle process a run."""
        assert self._process.stdin is not None
        self._status, self.idle = None, False
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
        """Reads the status of a run, or of the process if the run ended it."""
        line = self._answers.readline() if answered else ""
        if not line:
            self._status = self.end()
            return
        status, *last = line.split()
        self._status, self.full = int(status), worker.LAST in last
        self.idle = not self.full

    def end(self, *, within: float | None = None) -> int:
        """Lets the process end, or kills it after `within` s; returns its status."""
        self.idle = False
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # input that was not read
            self._process.stdin.close()
        self._answers.close()
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Submitit(Launcher):
    """Submits one Slurm job per run, through `submitit`.

    Jobs outlive a sweep that is killed; start it again when they have ended. A job that
    reaches its time limit has failed, and resumes when the sweep is started again.
    """

    def __init__(
        self, folder: Path, *, parameters: Mapping[str, Any], cluster: str = "slurm"
    ) -> None:
        """Prepares the executor; no job is submitted yet.

        Args:
          folder: folder for the files of jobs, on a disk that all machines share.
          parameters: of `submitit.AutoExecutor.update_parameters`, such as
            {"timeout_min": 60, "gpus_per_node": 1, "slurm_partition": "long"}.
          cluster: "slurm", or "local" for local processes instead of jobs.
        """
        try:
            import submitit

            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**parameters)
        except Exception as error:  # submitit raises many types, even NameError
            raise InputError(
                f"--launcher slurm: expected the package submitit, a cluster and its "
                f"parameters, got: {error}; pip install 'rlhf-jax[slurm]', start it "
                f"where sbatch is, and see [slurm] of the file"
            ) from error

    def start(self, run: Planned) -> Process:
        """Submits a run, whose output goes to its log.

        Raises:
          StopError: the cluster refuses the job.
        """
        try:
            return _Job(self._executor.submit(_as_job, run))
        except Exception as error:
            raise StopError(
                f"--launcher slurm: expected a job of {run.name} to be taken, got: "
                f"{error}; check [slurm] in the file, and start the sweep again"
            ) from error


class _Job:
    """A job as a `Process`."""

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
        except Exception:  # the job was cancelled, or its machine was lost
            return 1


def _as_job(run: Planned) -> int:
    """Runs inside the job, whose signals reach the run too; returns its status."""
    return _process(run).wait()


def _tie() -> tuple[str, ...]:
    """Prefix of a command that is killed when this process is (`tied`)."""
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
