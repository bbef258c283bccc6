"""Where else the rows of metrics.jsonl go: TensorBoard, Weights & Biases, Trackio."""

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
    """Checks that the packages that a run wants can be imported, before it begins.

    Raises:
      InputError: one cannot.
    """
    for extra, package in config.loggers.items():
        try:
            importlib.import_module(package)
        except Exception as error:  # they do as they like when they are imported
            message = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"--{extra}: expected the package {package} to be imported, got: "
                f"{message:.200}; pip install 'rlhf-jax[{extra}]' again, or leave "
                f"--{extra} out"
            ) from error


def chosen(config: RunConfig) -> list[Sink]:
    """The loggers that a run asks for."""
    made: list[Sink] = []
    if config.tensorboard:
        made.append(TensorBoard(config.out))
    if config.wandb:
        made.append(Wandb(config.out, config=to_json(config)))
    if config.trackio:
        made.append(Trackio(config.out, config=to_json(config)))
    return made


class TensorBoard(Sink):
    """Events in folder/tensorboard, by stage and step (extra `tensorboard`).

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
    """A W&B run named for the folder, each stage on its own step axis (extra `wandb`).

    The run's id stands in folder/wandb.txt, so that a resume goes on with it.
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
    """A Trackio run named for the folder, on this machine (extra `trackio`).

    It stands in the project rlhf_jax where Trackio keeps its runs, TRACKIO_DIR or else
    in the cache of Hugging Face. Its name is in folder/trackio.txt, so that a resume
    goes on with it; that writes the steps after its snapshot again, with the same
    values. NaN and infinities are kept as such.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # Trackio goes on with runs by their names: two folders are not one run.
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
    """What a file holds, which is written with this text where it is missing."""
    if not path.exists():
        write_text(path, text)
    return path.read_text()
