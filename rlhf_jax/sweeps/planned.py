"""The runs of a sweep: their commands, their folders, and which are finished.

OUT/sweep.json                     the first declaration of the sweep, and the newest
OUT/runs/kl_coef=0.05/seed_0/      the folder of a run
OUT/logs/kl_coef=0.05/seed_0.log   the output of a run
OUT/results.json                   see `results`
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, lock, parsing
from rlhf_jax.runs.proof import run_files, sums
from rlhf_jax.runs.run_config import words_of
from rlhf_jax.sweeps import declaration
from rlhf_jax.sweeps.declaration import (
    TRAINER,
    Cell,
    Sweep,
    Value,
    hashable,
)

BEGUN = "sweep.json"
EXPECTED = f"the {BEGUN} of a sweep"
ADVICE = "give the --out of rlhf-jax sweep"
SHAPE: parsing.Shape = {
    "trainer": str | None,
    "program": [str],
    "options": {},
    "cells?": {},
    "asked?": {
        "question": str,
        "seeds": [int],
        "measures": {},
        "claims": {},
        "cells": [{"values": [[object]], "options": [[object]], "trainer": str | None}],
    },
}
ASKED = "asked"  # key in sweep.json: the newest declaration of the sweep
SEED = "{seed}"  # replaced by the run's seed in an option


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run of a sweep: one cell and one seed."""

    cell: Cell
    seed: int
    folder: Path
    log: Path
    options: tuple[str, ...]  # of its trainer or program, without --resume
    module: str | None  # module that runs it; None if `program` begins with a file
    program: tuple[str, ...]  # arguments before the options
    shown: tuple[str, ...]  # the program as a person types it

    @property
    def name(self) -> str:
        """For example "kl_coef=0.05 seed 0"."""
        return f"{self.cell.name} seed {self.seed}"

    @property
    def done(self) -> bool:
        """Whether summary.json exists, which a run writes when it has finished."""
        return (self.folder / run_files.SUMMARY).exists()

    def arguments(self) -> list[str]:
        """Returns the arguments that begin the run, or resume it if it has begun."""
        begun = (self.folder / folder.CONFIG).exists()
        resume = ["--resume"] if begun else []
        return [*self.program, *self.options, *resume, "--no-progress"]

    def command(self) -> list[str]:
        """Returns the command that runs it in a process of its own."""
        # -P leaves the working directory out of the path, like a console script.
        module = [] if self.module is None else ["-P", "-m", self.module]
        return [sys.executable, *module, *self.arguments()]

    def line(self) -> str:
        """Returns its command as a person types it."""
        return shlex.join((*self.shown, *self.options))


def runs_of(sweep: Sweep, *, out: Path) -> list[Planned]:
    """Returns every run of a sweep: all cells of the first seed, then of the next."""
    planned = []
    for seed in sweep.seeds:
        for cell in sweep.cells:
            module, program = None, sweep.program
            shown = ("python", *program)
            if (trainer := cell.trainer or sweep.trainer) is not None:
                module, program = "rlhf_jax.train.main", (trainer,)
                shown = ("rlhf-jax", trainer)
            place = Path(cell.name) / f"seed_{seed}"
            own = [*sweep.options.items(), *cell.options]
            options = [
                word for name, value in own for word in words_of(f"--{name}", value)
            ]
            planned.append(
                Planned(
                    cell=cell,
                    seed=seed,
                    folder=out / "runs" / place,
                    log=out / "logs" / place.with_suffix(".log"),
                    options=(
                        *(word.replace(SEED, str(seed)) for word in options),
                        f"--seed={seed}",
                        f"--out={out / 'runs' / place}",
                    ),
                    module=module,
                    program=program,
                    shown=shown,
                )
            )
    return planned


def begin(sweep: Sweep, *, out: Path) -> None:
    """Makes the folder of a sweep, or checks that it belongs to the same sweep.

    Cells, seeds, measures and claims may be added. Options of existing cells may not
    change, since finished runs would be counted under options that they did not have.
    """
    path = out / BEGUN
    plan: dict[str, Any] = {
        "trainer": sweep.trainer,
        "program": sweep.program,
        "options": dict(sweep.options),
        "cells": {
            cell.name: dict(cell.options)
            | ({} if cell.trainer is None else {TRAINER: cell.trainer})
            for cell in sweep.cells
        },
        ASKED: {
            "question": sweep.question,
            "seeds": sweep.seeds,
            "cells": [dataclasses.asdict(cell) for cell in sweep.cells],
            "measures": {
                name: dataclasses.asdict(one) for name, one in sweep.measures.items()
            },
            "claims": dict(sweep.claims),
        },
    }
    plan = json.loads(json.dumps(plan, default=str))  # tuples are lists, dates texts
    before, got = None, ""
    if path.exists():
        try:
            before = _read(path)
        except InputError as error:
            got = str(error)
        except ValueError as error:
            got = f"a {BEGUN} that cannot be read: {error}"
    elif out.is_dir():
        names = {child.name for child in out.iterdir()} - {lock.NAME}
        got = ", ".join(sorted(names)[:4])
    elif out.exists():
        got = "a file"
    if got:
        raise InputError(
            f"--out {out}: expected a folder of a sweep, or none, got {got}; give "
            f"another"
        )
    if before is not None:
        cells = before.get("cells", {})
        for name, was, now in (
            *((n, before[n], plan[n]) for n in ("trainer", "program", "options")),
            *(
                (f"cell {name}", cells[name], now)
                for name, now in plan["cells"].items()
                if name in cells
            ),
        ):
            if was != now:
                raise InputError(
                    f"--out {out}: expected the sweep that this folder began with, "
                    f"whose {_difference(name, was, now)}; give another --out, or "
                    f"change it back"
                )
        plan["cells"] = cells | plan["cells"]
    out.mkdir(parents=True, exist_ok=True)
    folder.write_json(path, sums.sealed(plan, files={}))


def _read(path: Path) -> dict[str, Any]:
    """Reads sweep.json; InputError if it is another file, ValueError if changed."""
    plan = parsing.read_object(path, expected=EXPECTED, advice=ADVICE, shape=SHAPE)
    sums.opened(path)
    return plan


def begun(out: Path) -> Sweep:
    """Reads the newest declaration of the sweep in a folder, without `slurm`."""
    path = out / BEGUN
    plan = parsing.read_object(path, expected=EXPECTED, advice=ADVICE, shape=SHAPE)
    if ASKED not in plan:
        raise InputError(
            f"{path}: expected the measures and claims of the sweep, got those of an "
            f"older version, which kept none; give the command of the sweep again, "
            f"which leaves runs that are done alone"
        )
    try:
        sums.opened(path)
        asked = plan[ASKED]
        sweep = Sweep(
            question=asked["question"],
            trainer=plan["trainer"],
            program=tuple(plan["program"]),
            seeds=tuple(asked["seeds"]),
            options=plan["options"],
            cells=tuple(
                Cell(_pairs(one["values"]), _pairs(one["options"]), one["trainer"])
                for one in asked["cells"]
            ),
            measures={
                name: declaration.measure(name, one)
                for name, one in asked["measures"].items()
            },
            claims={name: str(claim) for name, claim in asked["claims"].items()},
            slurm={},
        )
        hash(sweep.cells)
        runs_of(sweep, out=out)  # raises if the options are malformed
        return sweep
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"one that no sweep wrote: {type(error).__name__}: {error}"
        raise parsing.Source(str(path), EXPECTED, ADVICE).refusal(got) from None


def _pairs(pairs: list[list[Any]]) -> tuple[tuple[str, Value], ...]:
    return tuple((name, hashable(value)) for name, value in pairs)


def _difference(name: str, begun: Any, now: Any) -> str:
    """For example "options.num_steps was 10, got 20"."""
    if not isinstance(begun, dict) or not isinstance(now, dict):
        return f"{name} was {begun}, got {now}"
    fields = sorted(begun.keys() | now.keys())
    field = next(field for field in fields if begun.get(field) != now.get(field))
    was, is_now = begun.get(field, "not given"), now.get(field, "none")
    return f"{name}.{field} was {was}, got {is_now}"
