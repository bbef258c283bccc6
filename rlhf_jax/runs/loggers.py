"""Loggers that copy the rows of metrics.jsonl: TensorBoard, W&B and Trackio."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import alarms
from rlhf_jax.runs.alarms import Alarm
from rlhf_jax.runs.folder import write_text
from rlhf_jax.runs.metrics import Row, Sink
from rlhf_jax.runs.run_config import RunConfig, to_json

PROJECT = "rlhf_jax"


def check(config: RunConfig) -> None:
    """Checks that the packages of a run's loggers can be imported.

    Raises:
      InputError: a package cannot be imported.
    """
    for extra, package in config.loggers.items():
        try:
            importlib.import_module(package)
        except Exception as error:  # importing them may raise anything
            message = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"--{extra}: expected the package {package} to be imported, got: "
                f"{message:.200}; pip install 'rlhf-jax[{extra}]' again, or leave "
                f"--{extra} out"
            ) from error


def chosen(config: RunConfig) -> list[Sink]:
    """Opens the loggers that a config asks for."""
    made: list[Sink] = []
    if config.tensorboard:
        made.append(TensorBoard(config.out))
    if config.wandb:
        made.append(Wandb(config.out, config=to_json(config)))
    if config.trackio:
        made.append(Trackio(config.out, config=to_json(config)))
    return made


class TensorBoard(Sink):
    """Writes events to folder/tensorboard, by stage and step (extra `tensorboard`).

    A resumed run writes the steps after its snapshot again, with the same values.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self._writer = SummaryWriter(os.fspath(folder / "tensorboard"))

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Writes a scalar for every measured value, and a text for a new alarm."""
        for name, value in _measured(stage, row).items():
            self._writer.add_scalar(name, value, step)
        for alarm in alarms.begun(active, step=step):
            self._writer.add_text(f"{stage}/alarms/{alarm.name}", alarm.message, step)

    def close(self) -> None:
        """Closes the writer, which flushes it."""
        self._writer.close()


class Wandb(Sink):
    """A W&B run named after the folder (extra `wandb`).

    Each stage has its own step axis. The run's id is kept in folder/wandb.txt, so that
    a resume continues that run.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=PROJECT,
            name=folder.absolute().name,
            id=_kept(folder / "wandb.txt", uuid.uuid4().hex),
            resume="allow",
            dir=folder,
            config=config,
        )

    def begin(self, stage: str, step: int) -> None:
        """Gives the stage's metrics a step axis of their own."""
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Logs every measured value, and raises a W&B alert for a new alarm."""
        self._run.log({f"{stage}/step": step, **_measured(stage, row)})
        for alarm in alarms.begun(active, step=step):
            title = f"{stage} step {step}: {alarm.name}"
            self._run.alert(title=title, text=alarm.message)

    def close(self) -> None:
        """Finishes the W&B run."""
        self._run.finish()


class Trackio(Sink):
    """A Trackio run named after the folder, on this machine (extra `trackio`).

    Trackio keeps the project rlhf_jax in TRACKIO_DIR, by default in Hugging Face's
    cache. The run's name is kept in folder/trackio.txt, so that a resume continues that
    run; it writes the steps after its snapshot again, with the same values. NaN and
    infinities are kept as such.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # Trackio identifies runs by name, and folders of one name are different runs.
        name = f"{folder.absolute().name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=PROJECT,
            name=_kept(folder / "trackio.txt", name),
            resume="allow",
            config=config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Logs every measured value, and raises a Trackio alert for a new alarm."""
        self._run.log(_measured(stage, row), step=step)
        for alarm in alarms.begun(active, step=step):
            title = f"{stage} step {step}: {alarm.name}"
            self._run.alert(title=title, text=alarm.message, step=step)

    def close(self) -> None:
        """Finishes the Trackio run, which writes what is left."""
        self._run.finish()


def _measured(stage: str, row: Row) -> dict[str, float]:
    return {f"{stage}/{name}": x for name, x in row.items() if x is not None}


def _kept(path: Path, text: str) -> str:
    """Returns the contents of a file, which is first written if it is missing."""
    if not path.exists():
        write_text(path, text)
    return path.read_text()
