"""Run a grid of options with several seeds, and test claims on the results.

    rlhf-jax sweep sweep.toml --out runs/sweep [--print] [--jobs N]

The file declares a trainer, options of every run, a grid of options, seeds, measures
and claims (see sweeps/README.md). Each cell of the grid is, for each seed, an ordinary
run in OUT/runs, whose command --print shows. The same command resumes a sweep: complete
runs are kept, and a killed run resumes from its newest snapshot. A run that fails is
reported, and the others continue.

OUT/results.json has every measure of every seed, means with 95% intervals, differences
to the first cell seed by seed, and the answers: yes, no, or not enough seeds.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import InputError, StopError, located
from rlhf_jax.runs import command_line, folder, lock
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.sweeps import declaration, execution, measures, planned, results
from rlhf_jax.sweeps.declaration import Sweep
from rlhf_jax.sweeps.execution import Ended
from rlhf_jax.sweeps.launchers import Launcher, Local, Submitit, Workers
from rlhf_jax.sweeps.planned import Planned
from rlhf_jax.train import main as commands
from rlhf_jax.train.commands import parse
from rlhf_jax.train.config import capabilities


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `rlhf-jax sweep`."""

    file: tyro.conf.Positional[Path]
    """Declaration of the sweep, a .toml or .py file."""
    out: Path
    """Folder of the sweep; the folder of an earlier start is resumed."""
    print_: Annotated[bool, tyro.conf.arg(name="print")] = False
    """Whether to print the commands of all runs and run nothing."""
    jobs: int = 1
    """Number of runs at a time."""
    map: bool = False
    """Whether --jobs lasting processes run the cells, so that cells which differ only
    in numbers share compiled programs."""
    launcher: Literal["local", "slurm"] = "local"
    """Where runs are started: on this machine, or as Slurm jobs (extra slurm)."""

    def __post_init__(self) -> None:
        checks.positive(jobs=self.jobs)
        capabilities.exclude(
            {"--map": self.map},
            {f"--launcher {self.launcher}": self.launcher != "local"},
            reason="only local processes stay from run to run",
        )


def main(options: Config) -> None:
    """Runs `rlhf-jax sweep` with its options.

    Raises:
      StopError: a run failed; the message names each, with its last line.
      Interrupted: a signal arrived; the runs under way have saved.
    """
    urls.refuse(options.out, option="--out")
    sweep = declaration.read(options.file)
    runs = planned.runs_of(sweep, out=options.out)
    check_options(sweep, runs)
    results.check_claims(sweep)
    if options.print_:
        for run in runs:
            print(run.line())
        return
    # Before anything is written, or a second start would change the sweep of the first.
    with lock.hold(options.out):
        results.checked([run for run in runs if run.done])
        planned.begin(sweep, out=options.out)
        launcher: Launcher = Workers() if options.map else Local()
        if options.launcher == "slurm":
            launcher = Submitit(options.out / "logs" / "slurm", parameters=sweep.slurm)
        done = sum(run.done for run in runs)
        print(f"{len(runs)} runs of {len(sweep.cells)} cells, {done} done already")
        began, left = time.monotonic(), len(runs) - done
        if left:  # or a stop would leave the sealed results of an earlier start
            results.unseal(options.out)
        num_ended, warned = 0, False

        def tell(ended: Ended) -> None:
            nonlocal num_ended, warned
            num_ended += 1
            rest = (time.monotonic() - began) / num_ended * (left - num_ended)
            verdict = f"failed: {ended.why}" if ended.failed else "done"
            print(
                f"[{done + num_ended}/{len(runs)}] {ended.run.name}: {verdict} "
                f"({ended.seconds:.0f} s; about {rest:.0f} s left)",
                flush=True,
            )
            if not ended.failed and not warned:  # once, from the first complete run
                for line in measures.absent(sweep.measures, runs=[ended.run.folder]):
                    print(f"warning: {line}", file=sys.stderr, flush=True)
                warned = True

        ended = execution.run_all(runs, launcher=launcher, jobs=options.jobs, tell=tell)
        of_runs = results.collected(sweep, runs)
        document = results.seal(options.out, results.as_json(sweep, of_runs))
        folder.write_json(options.out / results.NAME, document)
    if sweep.question:
        print(f"\n{sweep.question}")
    results.tell(sweep, of_runs)
    for line in of_runs.notes:
        print(f"note: {line}")
    failed = [run for run in ended if run.failed]
    if failed:
        names = "\n".join(
            f"  {run.run.name} (status {run.status}): {run.why}\n    {run.run.log}"
            for run in failed
        )
        raise StopError(
            f"{len(failed)} of {len(runs)} runs failed, the others are complete:\n"
            f"{names}\nfix them, and run the same command again"
        )
    if of_runs.absent:
        raise InputError("\n".join(of_runs.absent))
    print(
        f"results are in {options.out / results.NAME}; tables and figures for a paper: "
        f"rlhf-jax paper {options.out} --out paper"
    )


def check_options(sweep: Sweep, runs: Sequence[Planned]) -> None:
    """Checks that the trainer accepts the options of every cell, before anything runs.

    A user's own program must exist; its options are not checked.
    """
    if sweep.program:
        if not Path(sweep.program[0]).exists():
            raise InputError(
                f"program: expected a Python file or folder first, seen from "
                f"{Path.cwd()}, got {sweep.program[0]}; start the sweep where it is"
            )
        return
    for run in runs:
        [name] = run.program
        if name not in (known := commands.trainers()):
            raise InputError(
                f"trainer: expected one of {', '.join(known)}, got {name}; choose "
                f"one, or give program"
            )
    for run in runs:
        if run.seed == sweep.seeds[0]:
            [name] = run.program
            trainer = commands.trainer(name)
            with located(run.cell.name):
                # With a screen, if an empty one, errors refer to --help-all.
                parse(trainer, run.options, prog=f"rlhf-jax {name}", screen={})


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax sweep`: runs a sweep from a command line."""
    options = command_line.cli(
        Config, prog="rlhf-jax sweep", description=__doc__, args=argv
    )
    jax.config.update("jax_platforms", "cpu")  # leave the devices to the runs
    try:
        main(options)
    except command_line.Interrupted as stop:
        print("stopped and saved; the same command goes on", file=sys.stderr)
        raise SystemExit(128 + stop.signum) from None
    except KeyboardInterrupt:
        print("stopped without saving; the same command goes on", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        if not options.print_:
            raise
        # The reader of --print, such as `head`, has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
