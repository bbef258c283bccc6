"""`rlhf-jax verify`: whether snapshots are whole and frozen models unmoved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tyro

from rlhf_jax.devices import processes
from rlhf_jax.functional.errors import StopError
from rlhf_jax.roles.reference.frozen import ReferenceMovedError
from rlhf_jax.runs import report
from rlhf_jax.runs.snapshots import files, proof

SHOWN = 12  # digits of a fingerprint, so that a table fits 80 columns


def verify(run: tyro.conf.Positional[Path]) -> None:
    """Check a run's snapshots: that all is as it was saved, and frozen models stand.

    Args:
      run: The run folder, an experiment's --out.

    Raises:
      InputError: there is no run, or no snapshot.
      StopError: a snapshot is damaged, or its file cannot be read.
      ReferenceMovedError: a frozen model moved, other than by its lifecycle; names the
        leaves.
    """
    processes.check_platform()
    checked = {
        (stage.name, step): files.check(stage, step)
        for stage in proof.stages(run)
        for step in files.numbers(stage)
    }
    report.table(
        f"Snapshots in {run}",
        ("stage", "step", "arrays", "verdict"),
        [(*name, check.arrays, check.verdict) for name, check in checked.items()],
    )
    damaged = {name: check.damage for name, check in checked.items() if check.damage}
    rows = proof.check_run(run, skipped=damaged)
    if rows:
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
    if damaged:
        raise StopError("\n".join([*map(str, damaged.values()), *moved]))
    if moved:
        raise ReferenceMovedError("\n".join(moved))
    print(f"{len(checked)} snapshots checked, none damaged")
    if rows:
        print(f"{len(rows)} verified, none moved")


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax verify`: from a command line to a table and a verdict."""
    tyro.cli(verify, prog="rlhf-jax verify", args=argv)
