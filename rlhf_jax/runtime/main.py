"""The console script `rlhf-jax`: what can be asked without an experiment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.frozen import ReferenceMovedError
from rlhf_jax.runtime import memory as memory_
from rlhf_jax.runtime import plan as plan_
from rlhf_jax.runtime import proof, report, token_kl, workload

SHOWN = 12  # digits of a fingerprint, so that a table fits 80 columns


def verify(run: tyro.conf.Positional[Path]) -> None:
    """Check from a run's snapshots that its frozen models are what they were.

    Args:
      run: The run folder, an experiment's --out.

    Raises:
      InputError, StopError: as `proof.check_run`.
      ReferenceMovedError: one moved, other than by its lifecycle; names the leaves.
    """
    rows = proof.check_run(run)
    report.table(
        f"Frozen models in {run}",
        ("stage", "step", "model", "fingerprint", "leaves", "verdict"),
        [row._replace(fingerprint=row.fingerprint[:SHOWN])[:-1] for row in rows],
    )
    moved = [
        f"{row.stage}, snapshot {row.step}, {row.model}: {row.moved}"
        for row in rows
        if row.moved is not None
    ]
    if moved:
        raise ReferenceMovedError("\n".join(moved))
    print(f"{len(rows)} verified, none moved")


def memory(options: Annotated[workload.Options, tyro.conf.arg(name="")]) -> None:
    """What PPO on a model will take of a device's memory, before anything is run."""
    memory_.run(options)


def plan(options: Annotated[plan_.Options, tyro.conf.arg(name="")]) -> None:
    """Whether PPO on a model fits a slice of TPUs that is not there, and how fast."""
    plan_.run(options)


def kl(options: Annotated[token_kl.Options, tyro.conf.arg(name="")]) -> None:
    """KL of a text between two models, token by token, on the terminal or as HTML."""
    token_kl.run(options)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command: status 2 for what the user got wrong, 1 for a bad result."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"verify": verify, "memory": memory, "plan": plan, "kl": kl},
            prog="rlhf-jax",
            description=__doc__,
            args=argv,
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except StopError as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from None
