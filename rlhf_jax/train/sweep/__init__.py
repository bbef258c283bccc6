"""Many runs as one question: a grid of options, seeds, and claims that are answered.

    rlhf-jax sweep sweep.toml --out runs/sweep [--print] [--jobs N]

The file declares a trainer, options of every run, a grid of options, seeds, measures
and claims (see sweeps/README.md). Each cell of the grid is, for each seed, an ordinary
run in OUT/runs, whose command --print shows. The same command again goes on: runs that
are done are left alone, and one that was killed goes on from its newest snapshot. A run
that fails is told and leaves the others alone.

OUT/results.json has every measure of every seed, means with 95% intervals, differences
to the first cell seed by seed, and the answers: yes, no, or not enough seeds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
import tyro

from rlhf_jax.runs import command_line
from rlhf_jax.train.sweep.options import Config
from rlhf_jax.train.sweep.runner import main

__all__ = ["Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax sweep`: from a command line to a table."""
    options: Any = tyro.cli(
        Config, prog="rlhf-jax sweep", description=__doc__, args=argv
    )
    jax.config.update("jax_platforms", "cpu")  # the runs' devices are left to them
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
        # The reader of the commands has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
