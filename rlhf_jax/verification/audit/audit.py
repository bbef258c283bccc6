"""Runs a code verifier on programs that it must reward and on cheats that it must not.

The solutions of a data set must earn 1. The cheats of `cheats.toml`, to which every
review of the verifier has added, must earn nothing on their own tests. A cheat without
tests of its own must earn nothing on those of the data set.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rlhf_jax.verification.code.trial import Verdict
from rlhf_jax.verification.unit_tests import BUILT_IN, Names

HERE = Path(__file__).parent
CHEATS, RIGHT = HERE / "cheats.toml", HERE / "right.toml"
Run = Callable[[str, Sequence[str]], Verdict]


class Program(NamedTuple):
    """A program and its tests."""

    name: str
    code: str
    tests: list[str]
    """Empty for a cheat of any tests, which defines `answer` (`for_row`)."""


class Tally(NamedTuple):
    """The outcomes of some programs."""

    programs: int
    right: list[str]
    """Names of the programs that earned 1."""
    wrong: list[str]
    """Names of the others, each with the reason."""
    refused: int
    timed_out: int
    suspicious: int


def programs(file: Path) -> list[Program]:
    """Reads the programs of `CHEATS` or `RIGHT`."""
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    made = []
    for one in read["program"]:
        tests = one.get("tests", [])
        tests = read["shared"][tests] if isinstance(tests, str) else tests
        made.append(Program(one["name"], one["code"], tests))
    return made


def for_row(cheat: Program, *, where: str, tests: Sequence[str]) -> Program:
    """Adapts a cheat of any tests: each name that the tests use is its `answer`."""
    names = sorted(Names(None, tests).free - BUILT_IN)
    code = "\n".join([cheat.code, *(f"{name} = answer" for name in names)])
    return Program(f"{where}: {cheat.name}", code, [*tests])


def tally(
    tried: Iterable[Program], *, run: Run, num_workers: int | None = None
) -> Tally:
    """Runs programs, several at a time.

    Args:
      num_workers: programs at a time; None is one per processor.
    """
    listed = list(tried)
    workers = os.cpu_count() if num_workers is None else num_workers
    with ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(lambda one: run(one.code, one.tests), listed))
    pairs = list(zip(listed, verdicts, strict=True))
    return Tally(
        len(listed),
        [one.name for one, verdict in pairs if verdict.right],
        [f"{one.name}: {v.why}" for one, v in pairs if not v.right],
        sum(verdict.refused for verdict in verdicts),
        sum(verdict.timed_out for verdict in verdicts),
        sum(verdict.suspicious for verdict in verdicts),
    )
