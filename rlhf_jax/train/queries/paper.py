"""Write a sweep for a paper: tables, figures, a methods paragraph and BibTeX.

    rlhf-jax paper runs/sweep --out paper
    rlhf-jax paper runs/sweep --out paper --width 5.5

SWEEP is the folder of `rlhf-jax sweep --out`. Tables say if runs are still missing. OUT
has tables as CSV, Markdown and LaTeX, figures as PDF and SVG with captions,
methods.tex, references.bib, and example.tex, which compiles all of it. Equal sweeps
give equal files, and the command replaces the files of an earlier paper.

The methods paragraph is made from the run folders, and says what they lack. For each
open claim the table has the number of seeds that would answer it at the present spread.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import tyro

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports.paper import writing
from rlhf_jax.runs import command_line
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.sweeps import planned, results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `rlhf-jax paper`."""

    sweep: tyro.conf.Positional[Path]
    """Folder of the sweep."""
    out: Path
    """Folder to write, which is absent, empty or of an earlier paper."""
    width: float = 3.25
    """Width of figures, inches; that of a column in two-column layout."""

    def check(self) -> None:
        """Raises InputError for options that are out of range."""
        urls.refuse(self.sweep, option="rlhf-jax paper")
        urls.refuse(self.out, option="--out")
        checks.within(
            least=1,
            most=20,
            advice="a column of two is 3.25 wide",
            **{"--width": self.width},
        )


def main(options: Config) -> None:
    """Runs `rlhf-jax paper` with its options."""
    options.check()
    sweep = planned.begun(options.sweep)
    writing.check(options.out)
    results.require(options.sweep, ("runs/",))  # runs without a summary are incomplete
    runs = planned.runs_of(sweep, out=options.sweep)
    done = sum(run.done for run in runs)
    if not done or not sweep.measures:
        raise InputError(
            f"{options.sweep}: expected a sweep with measures, and a run that is done, "
            f"got {len(sweep.measures)} measures and {done} of {len(runs)} runs done; "
            f"check the file of the sweep, and run its command again"
        )
    of_runs = results.collected(sweep, runs)
    for line in (*of_runs.absent, *of_runs.notes):
        print(f"warning: {line}", file=sys.stderr)
    left = writing.write(options.out, sweep, runs, of_runs, width=options.width)
    answers = [answered.answer for _, answered in of_runs.answers.values()]
    open_ = answers.count("not enough seeds")
    counts = {"measure": len(of_runs.values), "claim": len(answers)}
    shown = [f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items()]
    print(
        f"{done} of {len(runs)} runs, {', '.join(shown)} ({open_} open), in "
        f"{options.out}"
    )
    if left:
        print(f"of an earlier paper, and not replaced: {', '.join(left)}")


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax paper`: writes the folder from a command line."""
    options = command_line.cli(
        Config, prog="rlhf-jax paper", description=__doc__, args=argv
    )
    jax.config.update("jax_platforms", "cpu")  # leave the devices to the runs
    main(options)
