"""`rlhf-jax audit-verifier`: whether unit tests reward solutions, and no cheats."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tyro

from rlhf_jax.data import json_lines
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import InputError, StopError, located
from rlhf_jax.runs import command_line, report

SHOWN = 10  # failing programs that are named


def audit_verifier(
    data: tyro.conf.Positional[str],
    *,
    tests_field: str = "tests",
    solution_field: str = "solution",
    seconds: float = 5.0,
    num_rows: int = 20,
    num_workers: int | None = None,
    unsafe_verifier: bool = False,
) -> None:
    """Check unit tests as a reward: solutions must earn 1, and known cheats must not.

    Args:
      data: Rows with tests and a solution, in the format of `PythonTests`.
      tests_field: Field of a row with its tests.
      solution_field: Field of a row with a correct program.
      seconds: Time limit of a program with its tests.
      num_rows: Number of rows, from the beginning, on whose tests cheats are tried.
      num_workers: Number of programs at a time; None is one per processor.
      unsafe_verifier: Run cheats even without isolation from the system.

    Raises:
      StopError: a solution does not earn 1, or a cheat does.
    """
    checks.positive(num_workers=num_workers)
    checks.non_negative(num_rows=num_rows)
    # Not needed to parse a command line.
    from rlhf_jax.verification.audit import audit
    from rlhf_jax.verification.audit.audit import Program
    from rlhf_jax.verification.code.verifier import PythonTests

    verifier = PythonTests(tests_field, seconds=seconds).isolated(
        unsafe=unsafe_verifier
    )
    rows = []
    for row in json_lines.read_jsonl(data):
        solution = row.get(solution_field)
        if not isinstance(solution, str):
            raise InputError(
                f"{row.where}: expected a text in {solution_field!r}, got "
                f"{solution!r:.60}; name the field by --solution-field"
            )
        with located(row.where, ValueError):
            rows.append(
                Program(os.path.basename(row.where), solution, verifier.gold(row))
            )
    cheats = audit.programs(audit.CHEATS)
    tried = [one for one in cheats if one.tests]
    tried += [
        audit.for_row(one, where=row.name, tests=row.tests)
        for row in rows[:num_rows]
        for one in cheats
        if not one.tests
    ]
    tallies = {
        name: audit.tally(listed, run=verifier.run, num_workers=num_workers)
        for name, listed in (("solutions", rows), ("cheats", tried))
    }
    report.table(
        f"{data}, {seconds:g} s per program",
        ("programs", "number", "earn 1", "refused", "timed out", "suspicious"),
        [
            (name, one.programs, len(one.right), *one[3:])
            for name, one in tallies.items()
        ],
    )
    wrong, rewarded = tallies["solutions"].wrong, tallies["cheats"].right
    if wrong or rewarded:
        listed = [f"solution of {one}" for one in wrong]
        listed += [f"cheat of {one}" for one in rewarded]
        more = f"\n... and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
        raise StopError(
            f"expected every solution to earn 1 and no cheat, got {len(wrong)} "
            f"solutions that do not and {len(rewarded)} cheats that do; mend the "
            f"tests of these rows:\n" + "\n".join(listed[:SHOWN]) + more
        )
    print("every solution earns 1, and no cheat does")


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax audit-verifier`: runs the check from a command line."""
    command_line.call(audit_verifier, prog="rlhf-jax audit-verifier", args=argv)
