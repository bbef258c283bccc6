"""The options of `rlhf-jax sweep`, and the check of those of its runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.sweeps.declaration import Sweep
from rlhf_jax.sweeps.planned import Planned
from rlhf_jax.train.commands import RENAMED
from rlhf_jax.train.trainers import TRAINERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `rlhf-jax sweep`."""

    file: tyro.conf.Positional[Path]
    """What is swept, .toml or .py."""
    out: Path
    """Folder of the sweep; the one of an earlier start goes on."""
    print_: Annotated[bool, tyro.conf.arg(name="print")] = False
    """Whether the commands of all runs are printed, and nothing is run."""
    jobs: int = 1
    """Runs at a time."""
    map: bool = False
    """Whether the runs are mapped over --jobs processes that stay, so that cells which
    differ in numbers alone share compiled programs."""
    launcher: Literal["local", "slurm"] = "local"
    """Where runs are started: on this machine, or as jobs of Slurm (extra slurm)."""

    def __post_init__(self) -> None:
        checks.positive(jobs=self.jobs)
        if self.map and self.launcher != "local":
            raise InputError(
                f"--map: expected --launcher local, whose processes stay from run to "
                f"run, got {self.launcher}; leave one of them out"
            )


def check_options(sweep: Sweep, runs: Sequence[Planned]) -> None:
    """Checks that the trainer has every option, with such values, before anything runs.

    A program of one's own has to be there, and is not asked.

    Raises:
      InputError: there is no such trainer or program, or it refuses a run's options.
    """
    if sweep.program:
        if not Path(sweep.program[0]).exists():
            raise InputError(
                f"program: expected a Python file or folder first, seen from "
                f"{Path.cwd()}, got {sweep.program[0]}; start the sweep where it is"
            )
        return
    first = [run for run in runs if run.seed == sweep.seeds[0]]
    for run in first:
        [name] = run.program
        if name not in TRAINERS:
            raise InputError(
                f"trainer: expected one of {', '.join(TRAINERS)}, got {name}; choose "
                f"one, or give program"
            )
    for run in first:
        _check_run(run, *run.program)


def _check_run(run: Planned, name: str) -> None:
    module, output = TRAINERS[name].load(), io.StringIO()
    try:
        with _quiet(output):
            command_line.parse(
                module.Config,
                description=None,
                presets=vars(module).get("PRESETS"),
                renamed=RENAMED,
                prog=f"rlhf-jax {name}",
                argv=run.options,
            )
    except InputError as error:
        raise InputError(f"{run.cell.name}: {error}") from error
    except SystemExit:
        raise InputError(
            f"{run.cell.name}: expected options of rlhf-jax {name}, got "
            f"{_reason(output.getvalue())}; --help-all lists them"
        ) from None


@contextlib.contextmanager
def _quiet(output: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        yield


def _reason(box: str) -> str:
    """What the parser of options says first, below the title of its box."""
    lines = [line.strip("│| ") for line in box.splitlines()]
    parts = re.split(r"^\W*[-─]{9,}.*$", "\n".join(lines), flags=re.MULTILINE)
    texts = [" ".join(part.split()) for part in parts]
    return next(iter([text for text in texts if text][1:]), "another")
