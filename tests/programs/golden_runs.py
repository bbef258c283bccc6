"""Plays tiny runs and records their digests, to see whether a change keeps every bit.

    export PYTHONPATH=tests:tests/train
    python tests/programs/golden_runs.py --out before.jsonl
    python tests/programs/golden_runs.py --out after.jsonl --like before.jsonl

The runs are the kinds of `kill_kinds` and the rows of the covering array of all pairs
of features (`pairs`), but for those that need a server. A digest is of bytes: metrics,
samples and the weights that a run leaves. They are those of one machine and one version
of JAX, so that none is committed. Exits with status 1 where a run of both files
differs; runs of one alone are counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path

import kill_kinds
import kill_runs
import pairs
from kill_kinds import Kind

DEVICES = 8  # virtual ones, for the meshes of pairs
FILES = (
    "metrics.jsonl",
    "samples.jsonl",
    "*/model.safetensors",
    "*/adapter_*.safetensors",
)


def kinds() -> dict[str, Kind]:
    played = dict(kill_kinds.KINDS)
    for row in pairs.rows():
        command, *options = pairs.words(row)
        if pairs.SERVER not in options:
            name = ", ".join(f"{k} {v}" for k, v in row.items() if v != pairs.ABSENT)
            played[name] = Kind(command, tuple(options), devices=DEVICES)
    return played


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of a run's files by name."""
    files = sorted(file for pattern in FILES for file in out.glob(pattern))
    return {
        str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def read(path: Path) -> dict[str, dict[str, str]]:
    """Reads a record as {name: digests}."""
    rows = map(json.loads, path.read_text().splitlines())
    return {row["name"]: row["digests"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    parser.add_argument("--like", type=Path, help="a record that it must equal")
    parser.add_argument(
        "--every", type=int, default=1, help="plays each n-th run alone"
    )
    options = parser.parse_args()
    expected = {} if options.like is None else read(options.like)
    played = dict(list(kinds().items())[:: options.every])
    different = []
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as record:
        files = Path(folder, "files")
        pair_files = Path(folder, "pair_files")
        kill_kinds.write_files(files)
        pair_files.mkdir()
        pairs.write_files(pair_files)
        for number, (name, kind) in enumerate(played.items()):
            out = Path(folder, str(number))
            own = files if name in kill_kinds.KINDS else pair_files
            kill_runs.play(kind, own, out, kills=0, rng=random.Random(0))
            row = {"name": name, "digests": digests(out)}
            record.write(f"{json.dumps(row)}\n")
            record.flush()
            verdict = "recorded"
            if name in expected:
                same = expected[name] == row["digests"]
                verdict = "equal" if same else "DIFFERENT"
                different += [] if same else [name]
            print(f"{number + 1} of {len(played)}: {verdict}: {name}", flush=True)
    both = len(expected.keys() & played.keys())
    print(f"{both} runs compared, {len(different)} different")
    if options.like is not None:
        print(f"of one record alone: {len(expected.keys() ^ played.keys())}")
    sys.exit(1 if different or (expected and not both) else 0)


if __name__ == "__main__":
    main()
