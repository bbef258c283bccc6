"""Reads the file that declares a sweep, in TOML or Python; README.md shows one.

A Python file has the same names at its top level, so it can compute the grid. A value
of the grid may set several options, and name a trainer of its own:

    penalty = [
        { label = "none", kl_coef = 0.0 },
        { label = "k1 in the reward", kl_coef = 0.1, "penalty.placement" = "reward" },
    ]
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import refuse
from rlhf_jax.runs import parsing
from rlhf_jax.runs.run_config import word

Value = Any  # value of an option: a number, text, bool, or a list of these
FIELDS = (
    *("question", "trainer", "program", "seeds"),
    *("options", "grid", "measures", "claims", "slurm"),
)
OF_A_RUN = ("out", "seed", "resume", "resume_from", "config")  # set by the sweep
TRAINER = "trainer"
SEEDS = (0,)
LABEL = "label"  # key of a value of the grid that sets several options
LONGEST_NAME = 200  # bytes of a cell's name


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number of a run, in metrics.jsonl or summary.json."""

    metric: str | None = None  # name in metrics.jsonl
    last: int = 1  # last rows with the metric over which the mean is taken
    summary: str | None = None  # name in summary.json; "policy.gold" is nested


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of values of the grid."""

    values: tuple[tuple[str, Value], ...]  # (name in the grid, value or its label)
    options: tuple[tuple[str, Value], ...]  # (field, value) of this cell only
    trainer: str | None = None  # its own, in a sweep over several trainers

    @property
    def name(self) -> str:
        """For example kl_coef=0.05,value_estimator=k1; "run" without a grid.

        An option in a group is shortened to its last part where that is unambiguous.
        """
        shown = ",".join(
            f"{short(name, among=dict(self.values))}={word(value)}"
            for name, value in self.values
        )
        return re.sub(r"[^\w.,=+-]", "-", shown) or "run"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A question, and the runs that answer it."""

    question: str
    trainer: str | None  # command of `rlhf-jax`; None if each cell has its own
    program: tuple[str, ...]  # a Python file and its arguments, instead of a trainer
    seeds: tuple[int, ...]
    options: Mapping[str, Value]
    cells: tuple[Cell, ...]
    measures: Mapping[str, Measure]
    claims: Mapping[str, str]
    slurm: Mapping[str, Any]  # parameters of submitit for every run


def short(name: str, *, among: Iterable[str]) -> str:
    """Returns the last part of an option's name, or all of it if that is ambiguous."""
    last = name.rpartition(".")[2]
    alike = [one for one in among if one.rpartition(".")[2] == last]
    return last if len(alike) == 1 else name


def read(path: Path) -> Sweep:
    """Reads the sweep that a file declares."""
    if path.suffix not in (".toml", ".py"):
        raise InputError(
            f"{path}: expected a sweep in a file that ends with .toml or .py; rename it"
        )
    expected = "the declaration of a sweep that can be read"
    advice = "correct the file, or name another"
    if path.suffix == ".toml":
        fields = parsing.read_object(path, expected=expected, advice=advice)
        return declared(fields, source=str(path))
    source = parsing.Source(str(path), expected, advice)
    try:
        fields = _of_python(path)
    except SystemExit as stop:
        raise source.refusal(f"one that calls sys.exit({stop.code!r:.80})") from stop
    except Exception as error:  # from the user's code, or from opening the file
        raise source.refusal(f"{type(error).__name__}: {error}") from error
    if (why := parsing.fault(fields)) is not None:
        raise source.refusal(f"fields {why}")
    return declared(fields, source=str(path))


def _of_python(path: Path) -> dict[str, Any]:
    """The fields of a Python file, which may import modules beside it.

    Names similar to those of fields are included, and later refused as unknown.
    """
    beside = str(path.resolve().parent)
    sys.path.insert(0, beside)
    try:
        names = runpy.run_path(str(path))
    finally:
        sys.path.remove(beside)
    return {
        name: value
        for name, value in names.items()
        if difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85)
    }


def declared(fields: Mapping[str, Any], *, source: str) -> Sweep:
    """Makes a sweep from the fields of a file; errors name their `source`."""
    try:
        return _declared(fields)
    except InputError as error:
        lines = (f"{source}: {line}" for line in str(error).splitlines())
        raise InputError("\n".join(lines)) from error.__cause__


def _declared(fields: Mapping[str, Any]) -> Sweep:
    refuse(_faults(fields))
    trainer, program = fields.get("trainer"), fields.get("program", ())
    options = _table(fields, "options")
    grid = _table(fields, "grid")
    several = not (trainer is None or isinstance(trainer, str))
    axes = {TRAINER: trainer} | grid if several else grid
    cells = _cells(axes, fixed=options)
    if several:
        cells, trainer = tuple(_with_trainer(c) for c in cells), None
    of_cells = {name for cell in cells for name, _ in cell.options}
    of_runs = "a sweep gives to its runs; leave it out"
    of_sweep = "is a field of the sweep; move it above the first table"
    refuse(
        f"expected options of a run in [options] and [grid], got {name}, "
        f"which {of_runs if name in OF_A_RUN else of_sweep}"
        for name in sorted({*options, *grid, *of_cells} & {*OF_A_RUN, *FIELDS})
    )
    return Sweep(
        question=str(fields.get("question", "")),
        trainer=trainer,
        program=tuple(map(str, program)),
        seeds=tuple(fields.get("seeds", SEEDS)),
        options=options,
        cells=cells,
        measures={
            name: measure(name, value)
            for name, value in _table(fields, "measures").items()
        },
        claims={name: str(value) for name, value in _table(fields, "claims").items()},
        slurm=_table(fields, "slurm"),
    )


def _faults(fields: Mapping[str, Any]) -> Iterator[str]:
    """Unknown fields, and known ones that no other field is needed to refuse."""
    for name in fields:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]}? Else " if near else ""
            yield (
                f"expected the fields {', '.join(FIELDS)}, got {name}; {hint}"
                f"leave it out or, in Python, rename it"
            )
    trainer, program = fields.get("trainer"), fields.get("program", ())
    listed = isinstance(program, Sequence) and not isinstance(program, str)
    if not listed or (trainer is None) == (not program):
        got = "neither" if trainer is None else "both"
        yield (
            f'expected either trainer, as "ppo", or program, a list of words '
            f'as ["experiments/new_algorithm.py"], got '
            f"{got if listed else f'program = {program!r:.80}'}; name what a cell runs"
        )
    seeds = fields.get("seeds", SEEDS)
    whole = isinstance(seeds, Sequence) and all(type(seed) is int for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        yield (
            f"expected seeds as a list of different integers, got {seeds!r}; "
            f"write seeds = [0, 1, 2]"
        )


def _table(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Reads a field that is a table; nested tables are groups of options, "ppo.lam"."""
    table = fields.get(name, {})
    if not isinstance(table, Mapping):
        raise InputError(f"expected a table [{name}], got {table!r:.80}; write one")
    if name in ("measures", "claims", "slurm"):
        return dict(table)
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner = _table({name: value}, name)
            flat |= {f"{key}.{field}": one for field, one in inner.items()}
        else:
            flat[key] = value
    return {key.replace("-", "_"): value for key, value in flat.items()}


def _cells(grid: Mapping[str, Any], *, fixed: Mapping[str, Any]) -> tuple[Cell, ...]:
    """Makes every combination of a grid; its options must not be in `fixed`."""
    refuse(
        f"expected a list of values for {name} of the grid, got "
        f"{values!r:.80}; write {name} = [...], or move it to options"
        for name, values in grid.items()
        if not isinstance(values, Sequence) or isinstance(values, str) or not values
    )
    cells = []
    for values in itertools.product(*grid.values()):
        named, options = [], dict[str, Value]()
        for name, value in zip(grid, values, strict=True):
            own: Mapping[str, Any] = {name: value}
            if isinstance(value, Mapping):
                own = dict(_table({"grid": value}, "grid"))
                value = own.pop(LABEL, None)
                if value is None:
                    raise InputError(
                        f"expected {LABEL} = TEXT in each value of {name} "
                        f"that is a table, got {own!r:.80}; add a {LABEL}"
                    )
            both = fixed.keys() & {name, *own}
            if twice := sorted(both | (options.keys() & own.keys())):
                raise InputError(
                    f"expected each option in options or in one list of the "
                    f"grid, got {twice[0]} in {'both' if both else 'two'}; leave one "
                    f"of them out"
                )
            named.append((name, hashable(value)))
            options |= {field: hashable(one) for field, one in own.items()}
        cells.append(Cell(tuple(named), tuple(options.items())))
    names = collections.Counter(cell.name for cell in cells)
    for name, count in names.items():
        if count > 1 or len(name.encode()) > LONGEST_NAME:
            raise InputError(
                f"expected each cell to have a name of its own, of at most "
                f"{LONGEST_NAME} bytes, got {name:.100}; list each value once, and "
                f"give long values a {LABEL}"
            )
    return tuple(cells)


def _with_trainer(cell: Cell) -> Cell:
    """Moves the trainer of a cell from its options to its own field."""
    options = dict(cell.options)
    trainer = options.pop(TRAINER, None)
    if not isinstance(trainer, str):
        raise InputError(
            f'expected each trainer as a name, or as {{ {LABEL} = "grpo", '
            f'{TRAINER} = "grpo", group_size = 8 }}, got {trainer!r:.80} of the cell '
            f"{cell.name}; name one"
        )
    return Cell(cell.values, tuple(options.items()), trainer)


def measure(name: str, value: Any) -> Measure:
    """Reads a measure: a metric's name, or a table with the fields of `Measure`."""
    fields: dict[str, Any] = {"metric": value} if isinstance(value, str) else value
    try:
        made = Measure(**fields)
    except TypeError:
        made = Measure()
    named = [part for part in (made.metric, made.summary) if part is not None]
    one = len(named) == 1 and isinstance(named[0], str)
    several = type(made.last) is int and made.last >= 1
    if not (one and several and name.isidentifier()):
        raise InputError(
            f'expected a measure NAME = "objective/scores", '
            f"NAME = {{ metric = TEXT, last = 5 }} or NAME = {{ summary = TEXT }}, "
            f"with a NAME of letters, digits and _, got {name!r} = {value!r:.80}; "
            f"correct it"
        )
    return made


def hashable(value: Value) -> Value:
    """Returns a value with lists of any depth as tuples."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value
