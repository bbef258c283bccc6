"""Proof that frozen models stand still: what a snapshot says of them, and its check.

A stage's snapshot holds in its meta, for every frozen model by name:

    "moves"     false, or true where a lifecycle replaces the model
    "initial"   fingerprints as the stage began, "source" and "stored": root and leaves
    "now"       the same at this snapshot

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

from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import fingerprint, frozen
from rlhf_jax.roles.reference.frozen import Frozen, ReferenceMovedError
from rlhf_jax.runs.snapshots import files

Array = jax.Array
PyTree = Any
Record = dict[str, Any]
META = "frozen"  # its key in a snapshot's meta


class Proof:
    """The frozen models of a stage, those in its state and those beside it."""

    def __init__(
        self,
        state: PyTree,
        *,
        beside: Mapping[str, Frozen],
        moving: Collection[str] = (),
    ) -> None:
        """Takes down the fingerprints that the stage begins with.

        Args:
          state: of the stage at its first step; a `Frozen` in it is named by its path.
          beside: frozen models that the stage reads and its state does not hold.
          moving: names of those in the state that a lifecycle replaces.

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
        """Computes every digest again; what a snapshot of the state is to say.

        Raises:
          ReferenceMovedError: a model is not what was frozen, or is another than the
            stage began with although no lifecycle moves it; names the leaves.
        """
        record = {}
        for name, model in self._all(state).items():
            frozen.verify_all({name: model})
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
        """Checks a snapshot: that this stage is the one it is of, and that it is whole.

        `saved` is what `check` made of the state when it was saved, and the state is as
        restored; `where` names the snapshot.

        Raises:
          InputError: the stage began with other frozen models, or another lifecycle.
          ReferenceMovedError: a model is not what was frozen, or the state holds
            another frozen model than the snapshot says.
        """
        for name in sorted(saved.keys() | self._initial.keys()):
            if name not in saved or name not in self._initial:
                raise InputError(
                    f"{where}: expected the frozen models {sorted(self._initial)}, as "
                    f"this run has them, got {sorted(saved)}; resume with those that "
                    f"the run began with"
                )
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
    """What the check of one frozen model in one snapshot came to."""

    stage: str
    step: int
    model: str
    fingerprint: str  # root, of the stored form
    leaves: int
    verdict: str
    moved: str | None  # what is wrong, None for nothing


def stages(folder: Path) -> list[Path]:
    """The folders of a run's snapshots, one a stage.

    Raises:
      InputError: there is no run, or no snapshot.
    """
    folders = sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())
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
    beside the arrays, the snapshot's meta, the stage's beginning and other snapshots.

    Returns:
      A row for each model of each snapshot, but for the stages and steps `skipped`.

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
    for step in files.numbers(stage):
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
    """What contradicts what in a snapshot; None where all agree.

    There are no arrays of a model that the snapshot does not hold. `began` is what the
    stage's oldest snapshot says of its beginning.
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
        "source": dataclasses.asdict(frozen.source_fingerprint_of(model)),
        "stored": dataclasses.asdict(frozen.fingerprint_of(model)),
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
