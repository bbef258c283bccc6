"""Compares large values in the code verifier with the pickles of an earlier version.

    python experiments benchmarks.verifier --out runs/verifier

A program receives a value with many parts, returns it or changes it in place. Its tests
run, in turns, in this package and in the package of an earlier commit, which
`git archive` takes from the repository. Measured are the CPU seconds of a program's two
processes, start included, as the minimum over the rounds. The exit status is 1 if a
ratio is above `--most`.

Expect ratios of 0.3 to 1.1, up to 1.4 for large integers, in two minutes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import report

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "9f05f1c16f223e3154be1092359f444c4f1763f0"  # the last commit with pickles
VALUES = {  # {name: (a value with N parts, a statement that changes it as x)}
    "lists": ("[[i, i + 1] for i in range(N)]", "x[0].append(1)"),
    "tuples": ("[(i, i + 1) for i in range(N)]", "x.pop()"),
    "dicts": ("[{'a': i} for i in range(N)]", "x[0]['b'] = 1"),
    "sets": ("[{i} for i in range(N)]", "x[0].add(-1)"),
    "a dict": ("{i: i + 1 for i in range(N)}", "x.popitem()"),
    "a dict of lists": ("{i: [i] for i in range(N)}", "x.popitem()"),
    "a set": ("set(range(N))", "x.pop()"),
    "strings": ("[str(i) for i in range(N)]", "x.pop()"),
    "bytes": ("[b'%d' % i for i in range(N)]", "x.pop()"),
    "integers": ("[*range(N)]", "x.pop()"),
    "floats": ("[i / 7 for i in range(N)]", "x.pop()"),
    "large integers": ("[2**70 + i for i in range(N)]", "x.pop()"),
    "mixed rows": (
        "[[i, (i / 7, str(i)), {'a': [i]}] for i in range(N // 4)]",
        "x[0][2]['a'].append(1)",
    ),
}
SLOWER = {"large integers": 1.4}  # integers beyond 64 bits are written in decimal
WAYS = ("result", "argument", "change")
# Runs one program per line and prints the CPU seconds of its processes.
RUNS = """
import json, resource, sys
from rlhf_jax.verification.code import trial

def seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

trial.isolation()  # tries
print(trial.__file__, flush=True)
for line in sys.stdin:
    began = seconds()
    verdict = trial.run_tests(**json.loads(line), seconds=600.0, memory=4096)
    print(json.dumps([seconds() - began, verdict.why]), flush=True)
"""


class Program(NamedTuple):
    code: str
    tests: list[str]


def program(name: str, way: str, number: int) -> Program:
    """A program that uses a value of `VALUES` in one of `WAYS`."""
    value, change = VALUES[name]
    made = f"N = {number}\nx = {value}\n"
    if way == "result":
        return Program(
            f"def f():\n    N = {number}\n    return {value}",
            [f"{made}assert f() == x"],
        )
    if way == "argument":
        return Program("def f(x): return len(x)", [f"{made}assert f(x) == len(x)"])
    test = f"{made}f(x)\ny = x\n{made}{change}\nassert x == y"
    return Program(f"def f(x): {change}", [test])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    out: Path
    """Folder of figures.json and of the earlier package."""
    number: int = 100_000
    """Number of parts of a value."""
    rounds: int = 3
    """Runs of each program on each side, in turns."""
    values: tuple[str, ...] = tuple(VALUES)
    """Values to measure."""
    most: float = 1.2
    """Largest ratio of CPU seconds, now over before; 1.4 for large integers."""

    def __post_init__(self) -> None:
        checks.positive(number=self.number, rounds=self.rounds, most=self.most)
        if not {*self.values} <= VALUES.keys():
            raise InputError(
                f"--values: expected some of {', '.join(VALUES)}; got "
                f"{', '.join(self.values)}; choose among them"
            )


def package_before(place: Path) -> Path:
    """Extracts the package of `BEFORE` into a folder.

    Raises:
      InputError: the repository lacks the commit.
    """
    command = ["git", "-C", str(ROOT), "archive", BEFORE, "rlhf_jax"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise InputError(
            f"expected a clone with commit {BEFORE[:12]}, got "
            f"{done.stderr.decode().strip()}; fetch the whole history"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(place, filter="data")
    return place


def started(package: Path) -> Any:
    """Starts a process that runs programs with the package in a folder."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Modules are compiled once, as in an installed package.
    pipes["env"] = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    process: Any = subprocess.Popen([sys.executable, "-c", RUNS], cwd=package, **pipes)
    loaded = Path(process.stdout.readline().strip())
    assert loaded.is_relative_to(package.resolve()), loaded
    return process


def seconds(process: Any, tried: Program) -> float:
    """Runs the program and returns its CPU seconds."""
    process.stdin.write(json.dumps(tried._asdict()) + "\n")
    process.stdin.flush()
    taken, why = json.loads(process.stdout.readline())
    if why:
        raise InputError(f"expected a program that passes its tests, got {why}")
    return taken


def main(options: Config) -> None:
    """Prints the table and writes OUT/figures.json."""
    before = package_before(options.out / "before")
    rows: list[dict[str, Any]] = []
    with started(before) as old, started(ROOT) as new:
        for name in options.values:
            for way in WAYS:
                tried = program(name, way, options.number)
                pairs = [
                    (seconds(old, tried), seconds(new, tried))
                    for _ in range(options.rounds)
                ]
                least = [min(side) for side in zip(*pairs, strict=True)]
                row = {"value": name, "way": way, "before": least[0], "now": least[1]}
                rows.append(row | {"ratio": least[1] / least[0]})
        old.stdin.close()
        new.stdin.close()
    report.table(
        "CPU seconds of a program",
        ("value", "way", "before", "now", "ratio"),
        [tuple(row.values()) for row in rows],
    )
    ratios = [row["ratio"] for row in rows]
    print(f"ratios {min(ratios):.2f} to {max(ratios):.2f}, median ", end="")
    print(f"{statistics.median(ratios):.2f}")
    (options.out / "figures.json").write_text(json.dumps({"rows": rows}, indent=1))
    broken = [
        f"{row['value']}, {row['way']}"
        for row in rows
        if row["ratio"] > SLOWER.get(row["value"], options.most)
    ]
    if broken:
        sys.exit(f"expected ratios of at most {options.most:g}; {'; '.join(broken)}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
