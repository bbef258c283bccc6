"""What GRPO takes of chips that are not there, by their compilers: a grid of plans.

    python experiments benchmarks.plans --record experiments/recorded/plans/grid.jsonl
    python experiments benchmarks.plans --record ... --gpu-python ~/plan-cuda/bin/python
    python experiments benchmarks.plans --record ... --most 0        # the table alone

Every cell is a run of `rlhf-jax plan`, a process of its own: minutes and some GB of
memory each. Its row is written when it is done, and a later start goes on with the
cells that have none; one that the compiler refuses has a row with the reason. Chips of
NVIDIA need the extra `plan-cuda`, in an environment of its own (--gpu-python).

All cells: bfloat16, full remat, the reference in bfloat16, groups of 8, one epoch, a
prompt of 512 tokens (1,024 from 8,192 on) and responses that fill the rest. A chip has
8 responses of 2,048 tokens, 4 of 8,192 and 1 of more, of which an update reads one at a
time. 64 chips share a model by fsdp=64, 256 one of 70B; 128k is cut over context=8.

    MFU = model FLOPs / (seconds at the least · chips · peak FLOPs per second of a chip)
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

GIB = 2**30
LENGTHS = {"2k": 2048, "8k": 8192, "32k": 32_768, "128k": 131_072}  # tokens of a text
MODELS = {"1.5B": "qwen2.5-1.5b", "8B": "llama-3.1-8b", "70B": "llama-3.1-70b"}
CHIPS = {  # by count
    "v5e": {64: "8x8", 256: "16x16"},
    "v5p": {64: "4x4x4", 256: "4x8x8"},
    "h100": {64: "8x8", 256: "32x8"},
    "h200": {64: "8x8", 256: "32x8"},
}
GPUS = ("h100", "h200")
RESPONSES = {"2k": 8, "8k": 4}  # per chip; 1 of what is longer
CONTEXT = {"128k": 8}  # chips that share the columns of a row
LAST_LINES = 3  # of a plan that says why it is refused


@dataclasses.dataclass(frozen=True)
class Cell:
    """A plan of the grid."""

    model: str
    length: str
    chip: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.length} {self.chip}"

    @property
    def chips(self) -> int:
        return 256 if self.model == "70B" else 64

    @property
    def mesh(self) -> str:
        """How the chips share the work."""
        context = CONTEXT.get(self.length, 1)
        share = f",context={context}" if context > 1 else ""
        return f"fsdp={self.chips // context}{share}"

    def options(self) -> list[str]:
        """Of `rlhf-jax plan`."""
        tokens, rows = LENGTHS[self.length], RESPONSES.get(self.length, 1)
        prompt = 512 if tokens == LENGTHS["2k"] else 1024
        sharing = self.chips // CONTEXT.get(self.length, 1)
        return [
            *("--algorithm", "grpo", "--model", MODELS[self.model]),
            *("--chip", self.chip, "--topology", CHIPS[self.chip][self.chips]),
            *("--mesh", self.mesh, "--dtype", "bfloat16", "--remat", "full"),
            *("--reference", "bf16", "--batch-size", str(rows * sharing)),
            *("--num-minibatches", str(rows), "--prompt-length", str(prompt)),
            *("--max-new-tokens", str(tokens - prompt)),
        ]


CELLS = [
    Cell(model, length, chip)
    for length in LENGTHS
    for model in MODELS
    for chip in CHIPS
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    record: Path
    """JSON Lines, a row per plan; is continued."""
    cells: tuple[str, ...] = ()
    """Which, as "8B 8k v5e"; none is all of them in the order of their length."""
    gpu_python: Path | None = None
    """A Python with the extra plan-cuda; None leaves GPUs out."""
    most: int | None = None
    """Plans to make before the table is shown; None is all that have no row."""
    limit: float = 3600.0
    """Seconds that a plan may take."""

    def __post_init__(self) -> None:
        checks.positive(limit=self.limit)
        known = {cell.name for cell in CELLS}
        unknown = [name for name in self.cells if name not in known]
        if unknown:
            raise InputError(
                f"--cells: expected a model, a length and a chip of "
                f"{', '.join(MODELS)}; {', '.join(LENGTHS)}; {', '.join(CHIPS)}, got "
                f"{', '.join(unknown)}; name them as '8B 8k v5e'"
            )
        if not self.record.parent.is_dir():
            raise InputError(
                f"--record: expected a file in a folder that is there, got "
                f"{self.record}; make {self.record.parent} first"
            )


def plan(cell: Cell, *, python: Path, limit: float) -> dict[str, Any]:
    """The row of a cell: what the plan says in short, or why there is none.

    Args:
      python: an interpreter with the compiler for its chip.
      limit: seconds.
    """
    row: dict[str, Any] = {"cell": dataclasses.asdict(cell)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [python, "-m", "rlhf_jax.train.main", "plan", *cell.options()]
        try:
            done = subprocess.run(
                [*command, "--json", file],
                # Only the compiler is wanted: no TPU or GPU is looked for.
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return row | {"refused": f"not compiled within {limit:g} s"}
        if not file.exists():
            told = done.stderr.strip().splitlines()[-LAST_LINES:]
            return row | {"refused": " ".join(told) or f"status {done.returncode}"}
        made = json.loads(file.read_text())
    refused = [
        f"{program['name']}: {program['refused']}"
        for program in made["programs"]
        if program["refused"]
    ]
    kept = (
        *("command", "versions", "compiler", "chips", "mesh", "attention", "fits"),
        *("parameters", "peak", "held", "seconds", "model_flops", "mfu", "tokens"),
        *("tokens_per_second_per_chip", "shares"),
    )
    return row | {
        **{name: made.get(name) for name in kept},
        "memory": made["chip"]["memory"],
        "refused": "; ".join(refused) or None,
        "programs": {
            program["name"]: {
                "seconds": program.get("seconds"),
                "mfu": program.get("mfu"),
                "temporary": (program.get("bytes") or {}).get("temporary"),
            }
            for program in made["programs"]
        },
    }


def rows_of(record: Path) -> list[dict[str, Any]]:
    """The rows that are there, in the order of the grid."""
    if not record.exists():
        return []
    rows = {}
    for line in record.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[Cell(**row["cell"])] = row
    return [rows[cell] for cell in CELLS if cell in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line per plan."""
    header = (
        *("model, tokens, chips", "peak [GiB a chip]", "step [s]", "tokens/s a chip"),
        *("MFU", "MFU of the update", "rollout / score / update"),
    )
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for row in rows:
        cell = Cell(**row["cell"])
        name = f"{cell.model}, {cell.length}, {cell.chips} {cell.chip}"
        lines.append(" | ".join((name, *_figures(row))))
    return "\n".join(f"| {line} |" for line in lines)


def _figures(row: dict[str, Any]) -> list[str]:
    if row.get("peak") is None:
        return [f"no plan: {row['refused']}", *[""] * 5]
    peak = f"{row['peak']['total'] / GIB:.1f} of {row['memory'] / GIB:.1f}"
    if row["refused"] is not None or not row["fits"]:
        return [f"does not fit: {row['refused'] or peak}", *[""] * 5]
    shares = (row["shares"][name] for name in ("rollout", "score", "update"))
    update = row["programs"]["learning"]["mfu"]
    return [
        *(peak, f"{row['seconds']:.3g}", f"{row['tokens_per_second_per_chip']:,.0f}"),
        *(f"{row['mfu']:.1%}", f"{update:.0%}"),
        " / ".join(f"{share:.0%}" for share in shares),
    ]


def main(options: Config) -> None:
    """Makes what is missing, and prints the table of all that is there."""
    done = {Cell(**row["cell"]) for row in rows_of(options.record)}
    pythons = {
        chip: options.gpu_python if chip in GPUS else Path(sys.executable)
        for chip in CHIPS
    }
    left = [
        (cell, python)
        for cell in CELLS
        if cell not in done
        and (not options.cells or cell.name in options.cells)
        and (python := pythons[cell.chip]) is not None
    ]
    for cell, python in left[: options.most]:
        print(f"{cell.name}: {' '.join(cell.options())}", file=sys.stderr, flush=True)
        row = plan(cell, python=python, limit=options.limit)
        with options.record.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
    print(table(rows_of(options.record)))


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
