"""Audits the KL penalties of other libraries, by their own losses, `rlhf_jax.audit`.

    python experiments certificates.audits.other_libraries --output audits.json

A program in `peers/` per library calls the library's functions, in a process of its
own. TRL, verl and OpenRLHF share a virtual environment and Tunix has another; missing
ones are created (minutes, 2 GB each). A loss that cannot be called is audited by its
published formula and is marked.

Expect five minutes on an idle CPU core. If a program cannot run, standard error names
it and the exit status is 1.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from benchmarks import iteration
from benchmarks.environments import PeerError, python_of, surroundings
from benchmarks.peers import line_protocol

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parents[1]
PEERS: dict[str, str | None] = {  # {program in peers/: its environment}
    "tunix_losses": "tunix",
    "trl_losses": "audits",
    "verl_losses": "audits",
    "openrlhf_losses": "audits",
    "published": None,
}
HEADINGS = (
    *("library", "option", "file and line", "β: default; recipes", "fixed length"),
    *("ends by itself", "older sampler", "weight by length", "slope at −100, −20, 20"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    output: Path
    """JSON file to write all figures to; it must not exist."""
    only: tuple[str, ...] = tuple(PEERS)
    """Programs of `peers/` to run."""
    environments: Path = Path("~/.cache/rlhf_jax/benchmark")
    """Folder of the libraries' virtual environments, which are created if missing."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.only if name not in PEERS]
        if unknown or not self.only:
            raise InputError(
                f"--only: expected some of {', '.join(PEERS)}, got "
                f"{', '.join(unknown) or 'none'}; name others, or leave it out"
            )
        if self.output.exists():
            raise InputError(
                f"--output {self.output}: expected a file that is not there, got one; "
                f"give another"
            )


def audit_of(name: str, *, environments: Path) -> list[dict[str, Any]]:
    """The rows of one program of `peers/`.

    Raises:
      PeerError: its environment cannot be created, or the program fails.
    """
    environment = PEERS[name]
    python = python_of(environment, folder=environments)
    roots = map(str, (EXPERIMENTS.parent, EXPERIMENTS))
    variables = surroundings(environment) | {
        "PYTHONPATH": os.pathsep.join(roots),
        "JAX_PLATFORMS": "cpu",
    }
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        done = subprocess.run(
            [python, HERE / "peers" / f"{name}.py", out],
            capture_output=True,
            text=True,
            check=False,
            env=variables,
        )
        if done.returncode != 0:
            last = [*done.stderr.strip().splitlines(), ""][-1]
            raise PeerError(
                f"{name}: expected an audit, got status {done.returncode}: {last}; "
                f"run it by hand, or leave it out of --only"
            )
        return json.loads(out.read_text(encoding="utf-8"))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows as a Markdown table."""
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for row in rows:
        weights = [f"{weight:.2g}" for weight in row["by_length"].values()]
        lines.append(
            (
                _library(row),
                row["option"],
                ", ".join(place.split("/")[-1] for place in row["where"].split(", ")),
                row["coefficient"],
                *(told(finding) for finding in row["worlds"].values()),
                ", ".join(weights) if {*weights} != {"1"} else "1",
                ", ".join(
                    _number(row["slopes"][nats]) for nats in ("-100", "-20", "20")
                ),
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def defaults(rows: Sequence[Mapping[str, Any]]) -> str:
    """The default penalties of each library as a Markdown table."""
    lines = [
        ("library", "default", "β", "fixed length", "ends by itself"),
        ("---",) * 5,
    ]
    for row in rows:
        if "default" in row["option"]:
            library = _library(row)
            of_worlds = [told(finding) for finding in row["worlds"].values()]
            lines.append((library, row["option"], row["coefficient"], *of_worlds[:2]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _library(row: Mapping[str, Any]) -> str:
    by_formula = " *" * (row["by"] != "their code")
    return f"{row['library']} {row['version']}{by_formula}"


def told(finding: Mapping[str, Any]) -> str:
    """The verdict or, without one, the nearest KL and the distance to it."""
    if finding["verdict"] != "none of these":
        return finding["verdict"]
    sign = "minus " * (finding["scale"] < 0)
    return f"none ({sign}{finding['nearest']}, {finding['distance']:.2f} off)"


def _number(slope: float | str) -> str:
    return slope if isinstance(slope, str) else f"{slope:.2g}"


def main(options: Config) -> bool:
    """Runs the audits, writes the record and returns whether every program ran."""
    environments, failed = options.environments.expanduser(), {}
    rows: list[dict[str, Any]] = []
    for name in options.only:
        print(f"{name} ...", flush=True)
        try:
            rows += audit_of(name, environments=environments)
        except PeerError as error:
            failed[name] = str(error)
            print(f"error: {error}", file=sys.stderr, flush=True)
    record = {
        "command": "python experiments certificates.audits.other_libraries",
        "commit": iteration.commit(),
        "date": datetime.date.today().isoformat(),
        "versions": line_protocol.versions_of("rlhf-jax", "jax", "jaxlib"),
        "machine": f"{os.cpu_count()} CPU cores",
        "rows": rows,
        "failed": failed,
    }
    folder.write_json(options.output, record)
    print(table(rows))
    return not failed


if __name__ == "__main__":
    try:
        sys.exit(not main(tyro.cli(Config, description=__doc__)))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
