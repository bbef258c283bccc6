"""The console script `rlhf-jax`: what can be asked without an experiment."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.frozen import ReferenceMovedError
from rlhf_jax.runtime import proof, report

SHOWN = 12  # digits of a fingerprint, so that a table fits 80 columns


@dataclasses.dataclass(frozen=True)
class Verify:
    """Check from a run's snapshots that its frozen models are what they were."""

    run: tyro.conf.Positional[Path]
    """The run folder, an experiment's --out."""


def verify(options: Verify) -> None:
    """Prints what every snapshot holds of every frozen model.

    Raises:
      InputError, StopError: as `proof.check_run`.
      ReferenceMovedError: one moved, other than by its lifecycle; names the leaves.
    """
    rows = proof.check_run(options.run)
    report.table(
        f"Frozen models in {options.run}",
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


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "verify": (Verify, verify),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command: status 2 for what the user got wrong, 1 for a bad result."""
    try:
        options = tyro.extras.subcommand_cli_from_dict(
            {name: kind for name, (kind, _) in COMMANDS.items()},
            prog="rlhf-jax",
            description=__doc__,
            args=argv,
        )
        run = dict(COMMANDS.values())[type(options)]
        run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except StopError as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise SystemExit(1) from None
