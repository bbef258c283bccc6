"""Runs every certificate of this folder in one world each, two commands at a time.

    python experiments certificates.every --out runs/certificates

Each command is a run in OUT/NAME with its output in OUT/NAME.log. A finished command is
not run again, and an interrupted one resumes. Expect all certificates to hold; the exit
status is 1 if one does not, or if a command fails.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.folder import read_config

EXPERIMENTS = Path(__file__).resolve().parents[1]
NAMES = (  # the longest first, so that both cores are busy to the end
    *("certify", "certify_references", "certify_corrections", "certify_family"),
    *("certify_ratios", "certify_preferences", "certify_distill", "certify_turns"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    out: Path
    """Folder of the runs; existing runs are continued."""
    seed: int = 0
    """Seed of the first world."""
    num_worlds: int = 1
    """Worlds per command; their seeds are --seed, --seed + 1, ..."""
    jobs: int = 2
    """Number of commands that run at a time."""
    only: tuple[str, ...] = NAMES
    """Commands to run."""

    def __post_init__(self) -> None:
        checks.positive(num_worlds=self.num_worlds, jobs=self.jobs)
        unknown = [name for name in self.only if name not in NAMES]
        if unknown or not self.only:
            raise InputError(
                f"--only: expected some of {', '.join(NAMES)}, got "
                f"{', '.join(unknown) or 'none'}; name others, or leave it out"
            )


class Outcome(NamedTuple):
    """The result of a command."""

    name: str
    status: int  # exit status of the process; 0 if it had finished before
    certificates: int
    failed: tuple[str, ...]
    seconds: float  # duration that the run reports

    @property
    def holds(self) -> bool:
        """Whether the command succeeded and every certificate holds."""
        return self.status == 0 and not self.failed


def certify(name: str, options: Config) -> Outcome:
    """Runs a command, or reads the summary of its finished run.

    Args:
      name: one of NAMES.
      options: the options of all commands.

    Raises:
      InputError: the run was started with other worlds.
    """
    folder, status = options.out / name, 0
    summary = folder / "summary.json"
    _check_same(folder, options)
    if not summary.exists():
        command = [
            *(sys.executable, EXPERIMENTS, f"certificates.{name}", "--out", folder),
            *("--seed", options.seed, "--num-worlds", options.num_worlds),
            *(["--resume"] if folder.exists() else []),
        ]
        with (options.out / f"{name}.log").open("a", encoding="utf-8") as log:
            status = subprocess.run(
                list(map(str, command)), stdout=log, stderr=log, check=False
            ).returncode
    result: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    return Outcome(
        name,
        0 if result else status,
        result.get("certificates", 0),
        tuple(result.get("failed", ())),
        result.get("seconds", 0.0),
    )


def _check_same(folder: Path, options: Config) -> None:
    config = folder / "config.json"
    if not config.exists():
        return
    begun = read_config(config)
    for name in ("seed", "num_worlds"):
        if begun[name] != getattr(options, name):
            raise InputError(
                f"--{name.replace('_', '-')}: expected {begun[name]}, with which "
                f"{folder} was begun, got {getattr(options, name)}; give another --out"
            )


def line_of(outcome: Outcome) -> str:
    """A line of text about a result."""
    if outcome.status:
        return f"{outcome.name}: ended with status {outcome.status}; see its log"
    hold = outcome.certificates - len(outcome.failed)
    line = f"{outcome.name}: {hold} of {outcome.certificates} hold"
    failed = f"; not {'; '.join(outcome.failed)}" if outcome.failed else ""
    return f"{line}, {outcome.seconds:.0f} s{failed}"


def main(options: Config) -> int:
    """Runs all commands and returns the number of those that do not hold."""
    started = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda name: certify(name, options), options.only):
            print(line_of(outcome), flush=True)
            outcomes.append(outcome)
    print(
        f"{sum(outcome.certificates - len(outcome.failed) for outcome in outcomes)} of "
        f"{sum(outcome.certificates for outcome in outcomes)} certificates hold, "
        f"{time.perf_counter() - started:.0f} s"
    )
    ended = [outcome.name for outcome in outcomes if outcome.status]
    if ended:
        print(f"not counted: {', '.join(ended)}, which ended otherwise")
    return sum(not outcome.holds for outcome in outcomes)


if __name__ == "__main__":
    try:
        sys.exit(min(main(tyro.cli(Config, description=__doc__)), 1))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
