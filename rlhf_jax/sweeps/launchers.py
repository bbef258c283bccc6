"""Where the runs of a sweep are started: on this machine, or on a cluster's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.sweeps import tied
from rlhf_jax.sweeps.planned import Planned

BETWEEN = 1.0  # seconds between looks at a job that is to end


class Process(Protocol):
    """A run under way; a `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Its exit status once it has ended, -N of signal N."""
        ...

    def terminate(self) -> None:
        """Asks it to save and stop."""
        ...

    def wait(self) -> int:
        """Waits for its end."""
        ...


class Launcher(Protocol):
    """What starts runs."""

    def start(self, run: Planned) -> Process:
        """Starts a run, whose output goes to its log."""
        ...


class Local:
    """A process of this machine for each run, which is killed when the sweep is.

    It is in a session of its own: Ctrl-C comes to the sweep, which lets it save.
    """

    def start(self, run: Planned) -> Process:
        """Starts a run, whose output goes to its log."""
        parent = str(os.getpid())
        tie = (sys.executable, "-P", "-m", tied.__name__, parent)
        return _process(run, tie=tie, own_session=True)


class Submitit:
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

        Raises:
          InputError: submitit is not installed, knows no such cluster here, or has no
            such parameter.
        """
        if importlib.util.find_spec("submitit") is None:
            raise InputError(
                "--launcher slurm needs the package submitit, which is not installed; "
                "pip install 'rlhf-jax[slurm]', or leave --launcher out"
            )
        import submitit

        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**parameters)
        except Exception as error:  # of several kinds, and NameError among them
            raise InputError(
                f"--launcher slurm: expected a cluster and parameters of submitit, "
                f"got: {error}; start it where sbatch is, and see [slurm] of the file"
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


def _process(
    run: Planned, *, tie: Sequence[str] = (), own_session: bool = False
) -> subprocess.Popen[bytes]:
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [*tie, *run.command(), "--no-progress"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )
