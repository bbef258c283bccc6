"""Snapshots of everything that a run needs to resume to the last bit, by orbax.

    STAGE/100/arrays, meta      the saved values, complete together or not at all
    STAGE/100/files.json        the list of the snapshot's files, see `integrity`
    STAGE/100.set-aside         a snapshot newer than the one that a run resumed from
    STAGE/deleted               older snapshots, while they are removed

Every array and the meta are saved with their digests. A snapshot that differs from them
is refused with a `DamagedError`; none of its values reach the run.

This uses orbax's `CheckpointManager`. The V1 API in `orbax.checkpoint.experimental`
changes without notice; a test has it read these snapshots.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import LatestN

from rlhf_jax.devices import moving, processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import write_errors
from rlhf_jax.runs.snapshots import files, integrity
from rlhf_jax.runs.snapshots.integrity import DIGESTS
from rlhf_jax.runs.unfinished import DELETED, SET_ASIDE

Array = jax.Array
PyTree = Any
Target = jax.ShapeDtypeStruct | np.ndarray


class Snapshots(contextlib.AbstractContextManager[Any]):
    """Numbered snapshots in one folder; number N means that N steps are done.

    A snapshot has two parts, complete together or not there at all: `arrays`, any
    pytree of `jax.Array`s (typed random keys included), and `meta`, a JSON object
    (config, versions, reference fingerprint). A snapshot left incomplete by a kill is
    ignored, and removed by the next `save`. Leaving the context manager waits until the
    last snapshot is complete.
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, then: Callable[[], None] | None = None
    ) -> None:
        """Opens or makes `folder`, which keeps the `keep` newest snapshots.

        `then` is called in another thread whenever a snapshot is complete.
        """
        # Orbax logs many lines for each save, and hundreds for each error.
        logging.set_verbosity(logging.FATAL)
        self._folder = folder
        self._keep = keep
        self._newest: int | None = None  # the last step given to `save`
        self._unwritten = False
        self._then = then
        self._behind = futures.ThreadPoolExecutor(1)
        self._saving: futures.Future[None] | None = None
        handlers = ocp.DefaultCheckpointHandlerRegistry()
        handlers.add("arrays", ocp.args.StandardSave)
        handlers.add("arrays", ocp.args.StandardRestore)
        handlers.add("meta", ocp.args.JsonSave)
        handlers.add("meta", ocp.args.JsonRestore)
        with write_errors.writing(folder):
            self._remove_deleted()
            self._manager = ocp.CheckpointManager(
                folder.absolute(),
                handler_registry=handlers,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=LatestN(keep),
                    cleanup_tmp_directories=True,
                    # Renamed before removal, so a kill leaves no partial snapshot.
                    todelete_subdir=DELETED,
                    lightweight_initialize=True,  # `restore` reports damage
                ),
            )

    def __exit__(self, *exception: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """Returns the number of the newest snapshot; None without any."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Returns the numbers of all snapshots, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, *, arrays: PyTree, meta: dict[str, Any]) -> None:
        """Copies the arrays off the devices, and writes them in the background.

        The arrays may be donated once this returns. An older snapshot is removed only
        when this one is complete. An existing snapshot is kept: runs are deterministic,
        so it holds the same bits.

        Raises:
          WriteError: this snapshot or the previous one cannot be written.
        """
        if step in self._manager.all_steps():
            return
        self.wait()
        self._newest = step
        raw = jax.tree.map(_raw, _flat(arrays))
        digests = {"arrays": integrity.of_arrays(raw), "meta": integrity.of_meta(meta)}
        raw = {path: moving.move(x, moving.spread(x)) for path, x in raw.items()}
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(raw),
                    meta=ocp.args.JsonSave({**meta, DIGESTS: digests}),
                ),
            )
        self._saving = self._behind.submit(self._complete, step)

    def restore(self, step: int, *, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Restores (arrays, meta) of a snapshot, to the last bit.

        Args:
          step: number of the snapshot, one of `steps`.
          like: pytree of arrays or `jax.ShapeDtypeStruct`s (for random keys: arrays).
            Arrays are restored with its structure and shardings, whatever devices they
            were saved from, and are uncommitted where it has no sharding.

        Raises:
          InputError: there is no such snapshot, or its leaves, shapes or dtypes are
            not those of `like`; the message names them.
          DamagedError: the snapshot is damaged; the message names the faults.
        """
        self.wait()
        checks.one_of(
            among=tuple(self.steps()), **{f"snapshot in {self._folder}": step}
        )
        where = self._folder / str(step)
        # The first process checks for all, as orbax makes them wait for each other.
        first = processes.is_first()
        faults = integrity.faults_of_files(where) if first else []
        integrity.require_whole(
            where, processes.from_first("\n".join(faults)).splitlines()
        )
        flat = _flat(like)
        targets = {path: _target(leaf) for path, leaf in flat.items()}
        with files.damage_named(where):
            self._check(step, targets)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardRestore(targets),
                    meta=ocp.args.JsonRestore(),
                ),
            )
        meta, digests = files.split(restored["meta"], where)
        leaves = [
            _restored(restored["arrays"][path], leaf) for path, leaf in flat.items()
        ]
        if digests:
            raw = dict(zip(flat, map(_raw, leaves), strict=True))
            actual = integrity.of_arrays(raw)
            integrity.require_whole(where, integrity.differing(digests, actual))
        if first and (doubt := files.doubt(where, digests)):
            print(f"note: {where}: {doubt}", file=sys.stderr)
        return jax.tree.unflatten(jax.tree.structure(like), leaves), meta

    def complete(self, step: int) -> None:
        """Completes the newest snapshot, once restored, if a kill interrupted its save.

        Writes its list and removes older snapshots. All processes must call it.
        """
        with write_errors.writing(self._folder):
            for older in self.steps()[: -self._keep]:
                self._manager.delete(older)
            self._list(step)

    def set_aside(self, *, after: int) -> list[Path]:
        """Renames the snapshots after step `after`, so that they can be saved again.

        All processes must call it.

        Returns:
          The new paths.
        """
        self.wait()
        later = [step for step in self.steps() if step > after]
        names = [_unused(self._folder / f"{step}{SET_ASIDE}") for step in later]
        if processes.is_first():
            with write_errors.writing(self._folder):
                for step, name in zip(later, names, strict=True):
                    (self._folder / str(step)).rename(name)
        processes.wait()
        self._manager.reload()
        return names

    def wait(self) -> None:
        """Waits until the last snapshot is complete; raises as `close`."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._writing():
                saving.result()

    def close(self) -> None:
        """Waits until the last snapshot is complete.

        Raises:
          WriteError: it cannot be written, unless `save` has already raised that.
        """
        if self._unwritten:
            return  # orbax would wait for the failed snapshot, and raise again
        self.wait()
        self._behind.shutdown()
        self._manager.close()

    def _complete(self, step: int) -> None:
        """Waits until orbax has completed the snapshot, and writes its list."""
        self._manager.wait_until_finished()
        self._list(step)
        if self._then is not None:
            self._then()

    def _list(self, step: int) -> None:
        if processes.is_first() and not integrity.has_list(self._folder / str(step)):
            integrity.write_list(self._folder / str(step))
        self._remove_deleted()

    def _remove_deleted(self) -> None:
        if processes.is_first():
            shutil.rmtree(self._folder / DELETED, ignore_errors=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with write_errors.writing(self._folder / str(self._newest)):
                yield
        except write_errors.WriteError:
            self._unwritten = True
            raise

    def _check(self, step: int, targets: Mapping[str, Target]) -> None:
        saved = self._manager.item_metadata(step)["arrays"].tree
        expected = {path: _describe(leaf) for path, leaf in targets.items()}
        got = {path: _describe(leaf) for path, leaf in saved.items()}
        misfits = [
            f"{path}: expected {expected.get(path, 'no such leaf')}, "
            f"got {got.get(path, 'no such leaf')}"
            for path in sorted(expected.keys() | got.keys())
            if expected.get(path) != got.get(path)
        ]
        if misfits:
            raise InputError(
                f"snapshot {self._folder / str(step)} does not fit this run:\n"
                f"{checks.listed(misfits)}\n"
                f"resume with the models and options it was written with"
            )


def _unused(path: Path) -> Path:
    number, name = 1, path
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}-{number}")
    return name


def _flat(tree: PyTree) -> dict[str, Any]:
    """{path: leaf}, in the order of `jax.tree.leaves`: the form that orbax stores.

    A dict of paths represents any pytree, while orbax itself needs handlers for tuples
    of optax states, None and records.
    """
    leaves = jax.tree.leaves_with_path(tree)
    flat = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}
    assert len(flat) == len(leaves), "two leaves have one path"
    return flat


def _is_key(leaf: Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Array) -> Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _target(leaf: Array | jax.ShapeDtypeStruct) -> Target:
    """The form in which orbax restores a leaf: a host array if `like` is uncommitted.

    Orbax commits the arrays that it puts on a device, and jit refuses an array that is
    committed to one device beside arrays sharded over several.
    """
    raw = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    tied = leaf.committed if isinstance(leaf, Array) else leaf.sharding is not None
    if tied:
        where = jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=leaf.sharding)
        return where.update(sharding=moving.spread(where))
    return np.empty(raw.shape, raw.dtype)


def _restored(raw: Array | np.ndarray, like: Array) -> Array:
    if isinstance(raw, np.ndarray):
        leaf = jnp.array(raw)
    else:
        leaf = moving.move(raw, like.sharding)
    if _is_key(like):
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
    return leaf


def _describe(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
