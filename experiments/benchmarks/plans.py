"""A grid of plans of GRPO on chips that are not present, by their compilers.

    python experiments benchmarks.plans --record experiments/recorded/plans/grid.jsonl
    python experiments benchmarks.plans --record ... --gpu-python ~/plan-cuda/bin/python
    python experiments benchmarks.plans --record ... --most 0        # the table alone

Every cell is a run of `rlhf-jax plan` in a process of its own, which takes minutes and
some GB of memory. Its row is written when it ends, and a later start continues with the
cells without a row. If the compiler rejects a cell, its row has the reason. NVIDIA's
chips need the extra `plan-cuda` in a separate environment (--gpu-python).

All cells have bfloat16, full remat, the reference in bfloat16, groups of 8, one epoch,
a prompt of 512 tokens (1,024 from 8,192 on) and responses that fill the rest. A model
is sharded over 64 chips by fsdp=64, and a model of 70B over 256. Rows with more columns
than ROW_OF_A_CHIP are sharded over a context axis. A micro-batch has one row per fsdp
share. Responses are sampled with bfloat16 weights, sharded over as many chips as the
model has key and value heads; 70B on v5e is sampled by 16 chips together, with weights
and cache in int8.

If H100 fits, the row of H200 is that of H100 at the rates of H200: both are compiled
for the same instructions, and XLA's programs differed only by 0.1 MB of memory.

    MFU = model FLOPs / (least seconds · chips · peak FLOPs per second of a chip)
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import chips, measured
from rlhf_jax.train.plan import plan as planner

GIB = 2**30
LENGTHS = {"2k": 2048, "8k": 8192, "32k": 32_768, "128k": 131_072}  # tokens of a text
MODELS = {"1.5B": "qwen2.5-1.5b", "8B": "llama-3.1-8b", "70B": "llama-3.1-70b"}
CHIPS = {  # {chip: {number of chips: topology}}
    "v5e": {64: "8x8", 256: "16x16"},
    "v5p": {64: "4x4x4", 256: "4x8x8"},
    "h100": {64: "8x8", 256: "32x8"},
    "h200": {64: "8x8", 256: "32x8"},
}
GPUS = ("h100", "h200")
RESPONSES = {"2k": 8, "8k": 4}  # per row of an update; 1 if longer
GROUP = {"1.5B": 2, "8B": 8, "70B": 8}  # chips that sample together: key, value heads
LEAST = "70B", "v5e"  # the model and chip that need more than GROUP, and int8
ROW_OF_A_CHIP = {"v5e": 8192}  # tokens of a row on one chip, a quarter for 70B
LONGEST_OF_A_CHIP = 32_768  # the same on the other chips
LAST_LINES = 3  # lines of a rejected plan that give the reason
WORK = ("flops", "memory_bytes", "sent_bytes", "network_bytes", "exchanges")
PROGRAM_FIELDS = (
    "name",
    "stage",
    "bytes",
    "seconds",
    "by_hand",
    "model_flops",
    "mfu",
    "turns",
    "seconds_of_turn",
    *WORK,
)


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
    def context(self) -> int:
        """Chips that share the columns of a row."""
        most = ROW_OF_A_CHIP.get(self.chip, LONGEST_OF_A_CHIP)
        if self.model == "70B":
            most //= 4
        return max(1, LENGTHS[self.length] // most)

    @property
    def mesh(self) -> MeshShape:
        """The mesh of training."""
        return MeshShape(fsdp=self.chips // self.context, context=self.context)

    @property
    def sampler_mesh(self) -> MeshShape:
        """The mesh of sampling."""
        group = 16 if (self.model, self.chip) == LEAST else GROUP[self.model]
        return MeshShape(data=self.chips // group, tensor=group)

    @property
    def responses(self) -> int:
        """Responses per step."""
        responses = RESPONSES.get(self.length, 1) * self.mesh.fsdp
        return max(responses, self.sampler_mesh.data)

    def command(self) -> list[str]:
        """The arguments of `rlhf-jax plan`."""
        tokens = LENGTHS[self.length]
        prompt = 512 if tokens == LENGTHS["2k"] else 1024
        sampler = "here,dtype=bfloat16"
        if (self.model, self.chip) == LEAST:
            sampler = "here,dtype=int8,cache=int8"
        return [
            *("plan", "grpo", "--model", MODELS[self.model], "--verifier", "gsm8k"),
            *("--chip", self.chip, "--topology", CHIPS[self.chip][self.chips]),
            *("--placement.policy", str(self.mesh)),
            *("--placement.sampler", str(self.sampler_mesh), "--sampler", sampler),
            *("--dtype", "bfloat16", "--remat", "full"),
            *("--reference-storage.dtype", "bfloat16"),
            *("--batch-size", str(self.responses)),
            *("--num-minibatches", str(self.responses // self.mesh.fsdp)),
            *("--prompt-length", str(prompt)),
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
    """JSON Lines file with a row per plan; an existing file is continued."""
    cells: tuple[str, ...] = ()
    """Cells to plan, in this order, as "8B 8k v5e"; empty is all."""
    gpu_python: Path | None = None
    """Path of a Python with the extra plan-cuda; None skips GPUs."""
    most: int | None = None
    """Largest number of plans to make; None makes all that are missing."""
    limit: float = 3600.0
    """Longest duration of a plan, seconds."""

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


def plan(cell: Cell, *, python: Path | None, limit: float) -> dict[str, Any]:
    """The row of a cell: a summary of the plan, or the reason why it failed.

    Args:
      python: an interpreter with the compiler for the chip.
      limit: longest duration, seconds.
    """
    row: dict[str, Any] = {"cell": dataclasses.asdict(cell)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        words = cell.command()
        command = [python, "-m", "rlhf_jax.train.main", *words]
        try:
            done = subprocess.run(
                [*command, "--json", file],
                # Only the compiler is needed: JAX must not look for a TPU or GPU.
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return row | {"refused": f"not compiled within {limit:g} s"}
        if not file.exists():
            last_lines = done.stderr.strip().splitlines()[-LAST_LINES:]
            return row | {
                "refused": " ".join(last_lines) or f"status {done.returncode}"
            }
        made = json.loads(file.read_text())
    refused = [
        f"{program['name']}: {program['refused']}"
        for program in made["programs"]
        if program["refused"]
    ]
    plan_fields = (
        *("command", "versions", "compiler", "chips", "attention", "fits"),
        *("parameters", "peak", "held", "seconds", "model_flops", "mfu", "tokens"),
        *("tokens_per_second_per_chip", "shares", "within", "advice"),
    )
    return row | {
        **{name: made.get(name) for name in plan_fields},
        "memory": made["chip"]["memory"],
        "rows": cell.responses,
        "meshes": _meshes(cell),
        "refused": "; ".join(refused) or None,
        "programs": [
            {name: program.get(name) for name in PROGRAM_FIELDS}
            for program in made["programs"]
        ],
    }


def at_rates_of(row: dict[str, Any], chip: str) -> dict[str, Any]:
    """The row of the same programs on a chip with other rates.

    Args:
      row: the row of a chip with the same instructions.
      chip: a name of CHIPS.
    """
    figures = chips.named(chip)
    programs = []
    for program in row["programs"]:
        # Older rows lack exchanges.
        work = {name: program.get(name) or 0 for name in WORK}
        seconds = measured.least_seconds(figures, **work)
        bound = measured.bound_of(seconds, waits=program["stage"] == "rollout")
        mfu = measured.mfu(
            program["model_flops"], seconds=bound, chip=figures, num_chips=row["chips"]
        )
        programs.append(program | {"seconds": {**seconds, "bound": bound}, "mfu": mfu})
    speed = planner.speed(
        programs, chip=figures, num_chips=row["chips"], tokens=row["tokens"]
    )
    return row | {
        "cell": row["cell"] | {"chip": chip},
        "programs_of": row["cell"]["chip"],
        "memory": figures.memory,
        "programs": programs,
        **speed,
    }


def rows_of(record: Path) -> list[dict[str, Any]]:
    """The recorded rows, in the order of the grid."""
    if not record.exists():
        return []
    rows = {}
    for line in record.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[Cell(**row["cell"])] = row
    return [rows[cell] for cell in CELLS if cell in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line per plan."""
    header = (
        *("model, tokens, chips", "rows", "training / sampling mesh"),
        *("peak [GiB per chip]", "step [s]", "tokens/s per chip", "MFU"),
        *("MFU of the update", "rollout / score / update"),
    )
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for row in rows:
        cell = Cell(**row["cell"])
        name = f"{cell.model}, {cell.length}, {cell.chips} {cell.chip}"
        lines.append(" | ".join((name, *_figures(row))))
    return "\n".join(f"| {line} |" for line in lines)


def _figures(row: dict[str, Any]) -> list[str]:
    cell = Cell(**row["cell"])
    if row.get("peak") is None:
        reason = f"no plan: {row['refused']}"
        return [str(cell.responses), _meshes(cell), reason, *[""] * 5]
    layout = [str(row["rows"]), row["meshes"]]
    peak = f"{row['peak']['total'] / GIB:.1f} of {row['memory'] / GIB:.1f}"
    if row["refused"] is not None or not row["fits"]:
        return [*layout, f"does not fit: {row['refused'] or peak}", *[""] * 5]
    shares = (row["shares"][name] for name in ("rollout", "score", "update"))
    update = next(one for one in row["programs"] if one["name"] == "learning")["mfu"]
    return [
        *layout,
        *(peak, f"{row['seconds']:.3g}", f"{row['tokens_per_second_per_chip']:,.0f}"),
        *(f"{row['mfu']:.1%}", f"{update:.0%}"),
        " / ".join(f"{share:.0%}" for share in shares),
    ]


def _meshes(cell: Cell) -> str:
    """The meshes of training and sampling as text, without axes of one chip."""
    shapes = (dataclasses.asdict(mesh) for mesh in (cell.mesh, cell.sampler_mesh))
    return " / ".join(
        ",".join(f"{axis}={size}" for axis, size in shape.items() if size > 1)
        for shape in shapes
    )


def main(options: Config) -> None:
    """Makes the missing plans and prints the table of all plans."""
    done = {Cell(**row["cell"]): row for row in rows_of(options.record)}
    pythons = {
        chip: options.gpu_python if chip in GPUS else Path(sys.executable)
        for chip in CHIPS
    }
    by_name = {cell.name: cell for cell in CELLS}
    cells = [by_name[name] for name in options.cells or by_name]
    left = [cell for cell in cells if cell not in done and pythons[cell.chip]]
    for cell in left[: options.most]:
        print(shlex.join(["rlhf-jax", *cell.command()]), file=sys.stderr, flush=True)
        alike = done.get(dataclasses.replace(cell, chip="h100"))
        if cell.chip == "h200" and alike is not None and alike.get("fits"):
            row = at_rates_of(alike, "h200")
        else:
            row = plan(cell, python=pythons[cell.chip], limit=options.limit)
        done[cell] = row
        with options.record.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
    print(table(rows_of(options.record)))


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
