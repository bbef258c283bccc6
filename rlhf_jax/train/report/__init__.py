"""Runs on one page: which hacked its reward, and on which tokens.

    rlhf-jax report RUN... --html report.html
    rlhf-jax report RUN --watch

RUN is the folder of a run, or of a sweep for all of its runs. Runs whose configs differ
in the seed alone are one group, and their curves one line with a band.

The page is one file that needs no network: curves of any metric, the reward beside the
held-out judge, what differs between the configs, alarms, drift, and the sampled
responses token by token, shaded by their KL. --watch serves it while a run goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import tyro

from rlhf_jax.train.report.options import Config
from rlhf_jax.train.report.runner import main

__all__ = ["Config", "command", "main"]


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax report`: from a command line to a page."""
    options: Any = tyro.cli(
        Config, prog="rlhf-jax report", description=__doc__, args=argv
    )
    jax.config.update("jax_platforms", "cpu")  # the runs' devices are left to them
    try:
        main(options)
    except KeyboardInterrupt:  # ends --watch
        print(file=sys.stderr)
