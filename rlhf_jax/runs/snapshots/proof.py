"""Proof that frozen models do not move: their fingerprints in each snapshot.

The meta of a stage's snapshot has for every frozen model, by name:

    "moves"     whether a lifecycle replaces the model
    "initial"   fingerprints as the stage began, "source" and "stored": root and leaves
    "now"       those fingerprints at this snapshot

`Proof` writes and checks this while the stage runs; `check_run` checks it from disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import fingerprint, frozen
from rlhf_jax.roles.reference.frozen import Frozen, ReferenceMovedError
from rlhf_jax.runs.snapshots import files, resume

Array = jax.Array
PyTree = Any
Record = dict[str, Any]
META = "frozen"  # key in a snapshot's meta


class Proof:
    """Writes and checks the fingerprints of the frozen models of a stage."""

    def __init__(
        self,
        state: PyTree,
        *,
        beside: Mapping[str, Frozen],
        moving: Collection[str] = (),
    ) -> None:
        """Records the fingerprints that the stage begins with.

        Args:
          state: state before the first step; a `Frozen` in it is named by its path.
          beside: {name: frozen model} that the stage reads and does not have in state.
          moving: names of models in the state that a lifecycle replaces.

        Raises:
          InputError: `moving` names a model that is not in the state.
        """
        unknown = set(moving) - _models(state).keys()
        if unknown:
            raise InputError(
                f"moving: expected some of the frozen models {sorted(_models(state))} "
                f"in the state, got {sorted(unknown)}; only a snapshot's own can move"
            )
        self._beside, self._moving = beside, moving
        self._initial = {name: _record_of(m) for name, m in self._all(state).items()}

    def check(self, state: PyTree) -> Record:
        """Computes every digest again, and returns the record for a snapshot's meta.

        Raises:
          ReferenceMovedError: a model is not what was frozen, or differs from that at
            the start of the stage though no lifecycle moves it; names the leaves.
        """
        record = {}
        for name, model in self._all(state).items():
            frozen.verify_all({name: model}, fetch=processes.whole)
            initial, now = self._initial[name], _record_of(model)
            moves = name in self._moving
            if not moves and now != initial:
                raise ReferenceMovedError(
                    f"{name}: {_differing(initial['stored'], now['stored'])}, and no "
                    f"lifecycle moves it. Something replaced it: start again from the "
                    f"last verified snapshot"
                )
            record[name] = {"moves": moves, "initial": initial, "now": now}
        return record

    def check_resumed(self, saved: Record, state: PyTree, *, where: str) -> None:
        """Checks that a snapshot belongs to this stage and that its models are whole.

        Args:
          saved: record of `check` in the snapshot.
          state: state as restored.
          where: name of the snapshot, for messages.

        Raises:
          InputError: the stage began with other frozen models, or another lifecycle.
          ReferenceMovedError: a model is not what was frozen, or is not the one that
            the snapshot records.
        """
        if saved.keys() != self._initial.keys():
            raise InputError(
                f"{where}: expected the frozen models {sorted(self._initial)}, as this "
                f"run has them, got {sorted(saved)}; resume with those that the run "
                f"began with"
            )
        for name in sorted(saved):
            initial, moves = saved[name]["initial"], name in self._moving
            if saved[name]["moves"] != moves:
                raise InputError(
                    f"{where}: expected {name} to be "
                    f"{'moved by a lifecycle' if moves else 'frozen for the run'}, as "
                    f"this run has it, got the opposite; resume with its own lifecycle"
                )
            for form in ("source", "stored"):
                if initial[form] != self._initial[name][form]:
                    raise InputError(
                        f"{where}: {name}, as {form}: "
                        f"{_differing(initial[form], self._initial[name][form])}; "
                        f"resume with what the run began with, or start a new run with "
                        f"another --out"
                    )
        for name, record in self.check(state).items():
            then, now = saved[name]["now"], record["now"]
            if then != now:
                raise ReferenceMovedError(
                    f"{where}: {name}: {_differing(then['stored'], now['stored'])} by "
                    f"the digests beside it. Go on from an older snapshot"
                )

    def _all(self, state: PyTree) -> dict[str, Frozen]:
        return {**_models(state), **self._beside}


class Checked(NamedTuple):
    """The outcome of checking one frozen model in one snapshot."""

    stage: str
    step: int
    model: str
    fingerprint: str  # root, of the stored form
    leaves: int
    verdict: str
    moved: str | None  # the fault, None without one


def stages(folder: Path) -> list[Path]:
    """Returns the folders of a run's snapshots, one per stage.

    Raises:
      InputError: there is no run, or no snapshot.
    """
    folders = resume.stages(folder)
    if not folders:
        got = "no such folder" if not folder.exists() else "none"
        raise InputError(
            f"{folder}: expected a run folder with snapshots/STAGE/, got {got}; give "
            f"the --out of a run"
        )
    return folders


def check_run(
    folder: Path, *, skipped: Collection[tuple[str, int]] = ()
) -> list[Checked]:
    """Checks the frozen models of a run from its snapshots, without the experiment.

    Every digest is computed again from the arrays on disk, and compared with those
    beside the arrays, in the snapshot's meta, and at the start of the stage.

    Returns:
      One row for each model of each snapshot, without the (stage, step) in `skipped`.

    Raises:
      InputError: there is no run, or no snapshot.
      DamagedError: a snapshot is damaged.
    """
    return [
        checked
        for stage in stages(folder)
        for checked in _check_stage(stage, skipped=skipped)
    ]


def _check_stage(stage: Path, *, skipped: Collection[tuple[str, int]]) -> list[Checked]:
    rows: list[Checked] = []
    began: dict[str, Record] = {}
    for step in resume.steps(stage):
        if (stage.name, step) in skipped:
            continue
        for name, record in files.read_meta(stage, step).get(META, {}).items():
            arrays = files.read_arrays(
                stage, step, matches=lambda path, at=f"{name}/": path.startswith(at)
            )
            first = began.setdefault(name, record["initial"])
            leaves = {path.removeprefix(f"{name}/"): x for path, x in arrays.items()}
            fault = _fault(record, leaves, began=first)
            verdict = "as it began"
            if record["now"] != record["initial"]:
                verdict = "moved by its lifecycle"
            if not arrays:
                verdict += ", held outside"
            now = record["now"]["stored"]
            rows.append(
                Checked(
                    stage=stage.name,
                    step=step,
                    model=name,
                    fingerprint=now["root"],
                    leaves=len(now["leaves"]),
                    verdict=verdict if fault is None else "MOVED",
                    moved=fault,
                )
            )
    return rows


def _fault(
    record: Record, arrays: Mapping[str, np.ndarray], *, began: Record
) -> str | None:
    """The first contradiction about a model in a snapshot; None without one.

    `arrays` is empty for a model that the snapshot does not hold. `began` is the
    "initial" record of the stage's oldest snapshot.
    """
    now, initial = record["now"], record["initial"]
    if initial != began:
        return _differing(began["stored"], initial["stored"])
    if not record["moves"] and now != initial:
        return _differing(initial["stored"], now["stored"])
    if not arrays:
        return None
    recomputed = fingerprint.of_leaves(
        {
            path: fingerprint.in_hex(np.asarray(fingerprint.digest(leaf, path=path)))
            for path, leaf in _stored(arrays)
        }
    )
    if dataclasses.asdict(recomputed) != now["stored"]:
        return _differing(now["stored"], dataclasses.asdict(recomputed))
    for form in ("source", "stored"):
        rows = [fingerprint.in_hex(row) for row in arrays[f"{form}_digests"]]
        if rows != list(now[form]["leaves"].values()):
            return f"expected the {form} digests that its meta has, got others"
    return None


def _stored(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Array]]:
    """The parameters of a `Frozen` under the paths of their fingerprint."""
    for path, leaf in arrays.items():
        form, _, rest = path.partition("/")
        if form == "stored":
            names = (name for name in rest.split("/") if name != "held")  # of OnHost
            yield "/".join(names), jnp.asarray(leaf)


def _models(state: PyTree) -> dict[str, Frozen]:
    with_path = jax.tree.leaves_with_path(
        state, is_leaf=lambda node: isinstance(node, Frozen)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): node
        for path, node in with_path
        if isinstance(node, Frozen)
    }


def _record_of(model: Frozen) -> Record:
    return {
        "source": dataclasses.asdict(
            frozen.source_fingerprint_of(model, fetch=processes.whole)
        ),
        "stored": dataclasses.asdict(
            frozen.fingerprint_of(model, fetch=processes.whole)
        ),
    }


def _differing(expected: Record, actual: Record) -> str:
    """Both roots, and the leaves in which two fingerprints differ."""
    before, after = expected["leaves"], actual["leaves"]
    names = [
        path for path in {**before, **after} if before.get(path) != after.get(path)
    ]
    return (
        f"expected fingerprint {expected['root']}, got {actual['root']}, others in "
        f"{', '.join(names) if names else 'no leaf'}"
    )
