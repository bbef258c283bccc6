"""Groups runs whose configs differ only in the seed, and names the differences."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports.reading import Run, without_seed
from rlhf_jax.runs import parsing, run_config
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.sweeps import planned
from rlhf_jax.sweeps.declaration import short

SEED = "seed"
# Options about where and how often a run writes, which do not change its results.
RECORDING = run_config.MAY_DIFFER | (resume.MAY_CHANGE - {"num_steps"})
LONGEST = 60  # characters of a group's name


class Group(NamedTuple):
    """Runs whose configs differ only in the seed."""

    name: str
    runs: tuple[int, ...]  # numbers of runs, in order
    values: tuple[str, ...]  # values of the options that differ between groups


class Groups(NamedTuple):
    """All groups, and the options in which they differ."""

    options: tuple[str, ...]
    groups: tuple[Group, ...]


def grouped(runs: Sequence[Run]) -> Groups:
    """Returns the groups of runs, in order of their first run.

    Options about where a run is written, how often it saves and what it shows are not
    compared.
    """
    configs = [settings(run) for run in runs]
    members: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        key = json.dumps({k: v for k, v in config.items() if k != SEED}, sort_keys=True)
        members.setdefault(key, []).append(number)
    firsts = [configs[numbers[0]] for numbers in members.values()]
    options = tuple(name for name in differing(firsts) if name != SEED)
    groups = [
        Group(
            # The folder, without a last part that only names the seed.
            name=_name(options, config=first)
            or without_seed(runs[numbers[0]].name.split("/")),
            runs=tuple(numbers),
            values=tuple(shown(first.get(name)) for name in options),
        )
        for first, numbers in zip(firsts, members.values(), strict=True)
    ]
    names = [group.name for group in groups]
    of_its_own = (
        group
        if names.count(group.name) == 1
        else group._replace(name=runs[group.runs[0]].name)
        for group in groups
    )
    return Groups(options, tuple(of_its_own))


def settings(run: Run) -> dict[str, Any]:
    """Returns {option: value} of options and versions that may change a result.

    A text that its sweep wrote with {seed} is returned as the sweep wrote it.
    """
    *above, sweep = run.folder.absolute().parents[:3]
    written = {}
    if len(above) == 2 and (path := sweep / planned.BEGUN).is_file():
        written = _of_sweep(path, path.stat().st_mtime_ns)(above[0].name)
    chosen = {
        name: _without_seed(name, value, written, seed=run.config.get(SEED))
        for name, value in resume.flat(run.config).items()
        if RECORDING.isdisjoint(_with_groups(name))
    }
    return chosen | {
        f"version of {name}": value for name, value in run.versions.items()
    }


def _without_seed(
    name: str, value: Any, written: Mapping[str, Any], *, seed: Any
) -> Any:
    """A value of an option, as its sweep wrote it if that has {seed}."""
    for option, text in written.items():
        if f".{name}".endswith(f".{option}"):
            raw = json.dumps(text)
            filled = raw.replace(planned.SEED, str(seed))
            if planned.SEED in raw and filled == json.dumps(value):
                return text
    return value


@functools.lru_cache(maxsize=16)
def _of_sweep(path: Path, changed: int) -> Callable[[str], dict[str, Any]]:
    """Returns cell -> {option: value} as a sweep wrote them, {seed} included."""
    plan: dict[str, Any] = {}
    with contextlib.suppress(InputError):
        plan = parsing.read_object(
            path, expected="", advice="", shape={"options?": {}, "cells?": {}}
        )
    options, cells = plan.get("options", {}), plan.get("cells", {})
    return lambda cell: options | dict(cells.get(cell, {}))


def _with_groups(name: str) -> list[str]:
    """The name of an option, of each group that it is in, and its last part."""
    parts = name.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))] + parts[-1:]


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the options whose values differ, in order of appearance."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [
        name
        for name in names
        # As JSON, in which 1, 1.0 and true differ.
        if len(
            {json.dumps(config[name]) if name in config else "" for config in configs}
        )
        > 1
    ]


def shown(value: Any) -> str:
    """Returns a value as text of a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _name(options: Sequence[str], *, config: Mapping[str, Any]) -> str:
    """For example "kl_coef=0.2, lam=0.95", with short names where unambiguous."""
    name = ", ".join(
        f"{short(option, among=options)}={shown(config.get(option))}"
        for option in options
    )
    return name if len(name) <= LONGEST else ""
