"""Where else the rows of metrics.jsonl go: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import alarms
from rlhf_jax.runs.alarms import Alarm
from rlhf_jax.runs.folder import write_text

Row = dict[str, float | None]


class Sink(Protocol):
    """Somewhere else for the rows of metrics.jsonl: a terminal, TensorBoard, W&B."""

    def begin(self, stage: str, step: int) -> None:
        """A stage starts, or goes on, at `step`."""

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """A step's values, None where not measured, and the alarms that are active."""

    def close(self) -> None:
        """The run ends, well or not."""


def check(*, tensorboard: bool, wandb: bool, trackio: bool) -> None:
    """Checks that the packages that are wanted can be imported, before there is a run.

    Raises:
      InputError: one cannot.
    """
    packages = {
        "tensorboard": (tensorboard, "tensorboardX"),
        "wandb": (wandb, "wandb"),
        "trackio": (trackio, "trackio"),
    }
    for extra, (enabled, package) in packages.items():
        if not enabled:
            continue
        try:
            importlib.import_module(package)
        except Exception as error:  # they do as they like when they are imported
            message = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"--{extra}: expected the package {package} to be imported, got: "
                f"{message:.200}; pip install 'rlhf-jax[{extra}]' again, or leave "
                f"--{extra} out"
            ) from error


class TensorBoard:
    """Events in folder/tensorboard, by stage and step (extra `tensorboard`).

    A resumed run writes the steps after its snapshot again, with the same values.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self._writer = SummaryWriter(os.fspath(folder / "tensorboard"))

    def begin(self, stage: str, step: int) -> None:
        """Does nothing: every row names its stage."""

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Writes a scalar for every measured value, and a text for a new alarm."""
        for name, value in row.items():
            if value is not None:
                self._writer.add_scalar(f"{stage}/{name}", value, step)
        for alarm in alarms.begun(active, step=step):
            self._writer.add_text(f"{stage}/alarms/{alarm.name}", alarm.message, step)

    def close(self) -> None:
        """Closes the writer, which flushes it."""
        self._writer.close()


class Wandb:
    """A W&B run named for the folder, each stage on its own step axis (extra `wandb`).

    The run's id stands in folder/wandb.txt, so that a resume goes on with it.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = folder / "wandb.txt"
        if not id_file.exists():
            write_text(id_file, uuid.uuid4().hex)
        self._run = wandb.init(
            project="rlhf_jax",
            name=folder.absolute().name,
            id=id_file.read_text(),
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
        values = {name: value for name, value in row.items() if value is not None}
        self._run.log({f"{stage}/{k}": v for k, v in {"step": step, **values}.items()})
        for alarm in alarms.begun(active, step=step):
            title = f"{stage} step {step}: {alarm.name}"
            self._run.alert(title=title, text=alarm.message)

    def close(self) -> None:
        """Finishes the W&B run."""
        self._run.finish()


class Trackio:
    """A Trackio run named for the folder, on this machine (extra `trackio`).

    It stands in the project rlhf_jax where Trackio keeps its runs, TRACKIO_DIR or else
    in the cache of Hugging Face. Its name is in folder/trackio.txt, so that a resume
    goes on with it; that writes the steps after its snapshot again, with the same
    values. NaN and infinities are kept as such.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        name_file = folder / "trackio.txt"
        if not name_file.exists():
            # Trackio goes on with runs by their names: two folders are not one run.
            name = f"{folder.absolute().name}-{uuid.uuid4().hex[:8]}"
            write_text(name_file, name)
        self._run = trackio.init(
            project="rlhf_jax",
            name=name_file.read_text(),
            resume="allow",
            config=config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def begin(self, stage: str, step: int) -> None:
        """Does nothing: every row names its stage."""

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Logs every measured value, and raises a Trackio alert for a new alarm."""
        values = {name: value for name, value in row.items() if value is not None}
        self._run.log({f"{stage}/{k}": v for k, v in values.items()}, step=step)
        for alarm in alarms.begun(active, step=step):
            title = f"{stage} step {step}: {alarm.name}"
            self._run.alert(title=title, text=alarm.message, step=step)

    def close(self) -> None:
        """Finishes the Trackio run, which writes what is left."""
        self._run.finish()
