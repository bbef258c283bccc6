"""Snapshots on disk, read and checked without the run that saved them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import parsing
from rlhf_jax.runs.snapshots import integrity
from rlhf_jax.runs.snapshots.integrity import DIGESTS, DamagedError

READ_AT_ONCE = 2**30  # bytes of arrays that a check holds


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Reads the meta of a snapshot, one of `resume.steps`.

    Raises:
      DamagedError: the snapshot is damaged.
    """
    return _read_meta(folder, step)[0]


def read_arrays(
    folder: Path, step: int, *, matches: Callable[[str], bool]
) -> dict[str, np.ndarray]:
    """Reads some of a snapshot's arrays by path, without a state to restore into.

    Args:
      step: one of `resume.steps`.
      matches: path, such as "policy/layers/mlp/up/kernel" -> whether to read its array.

    Returns:
      {path: array on the host}; nothing is put on a device.

    Raises:
      DamagedError: the snapshot is damaged.
    """
    where = folder.absolute() / str(step) / "arrays"
    with _reader() as reader, damage_named(folder / str(step)):
        saved = reader.metadata(where).item_metadata.tree
        targets = {
            path: np.empty(leaf.shape, leaf.dtype)
            for path, leaf in saved.items()
            if matches(path)
        }
        if not targets:
            return {}
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        restore_args = dict.fromkeys(targets, as_numpy)
        how = ocp.args.PyTreeRestore(
            targets, restore_args=restore_args, partial_restore=True
        )
        return reader.restore(where, args=how)


class Checked(NamedTuple):
    """The outcome of checking a snapshot."""

    arrays: int  # number of arrays whose digests agree
    verdict: str
    damage: DamagedError | None
    added: Sequence[str] = ()  # files added since the snapshot was saved


def check(folder: Path, step: int) -> Checked:
    """Checks files, meta and arrays of a snapshot on disk, one of `resume.steps`."""
    where = folder / str(step)
    try:
        integrity.require_whole(where, integrity.faults_of_files(where))
        _, digests = _read_meta(folder, step)
        actual: dict[str, str] = {}
        for paths in _batches(folder, step):
            arrays = read_arrays(folder, step, matches=paths.__contains__)
            leaves = {path: jnp.asarray(array) for path, array in arrays.items()}
            actual |= integrity.of_arrays(leaves)
        if digests:
            integrity.require_whole(where, integrity.differing(digests, actual))
    except DamagedError as damage:
        return Checked(0, "DAMAGED", damage)
    verdict = doubt(where, digests) or "whole"
    return Checked(len(digests), verdict, None, integrity.added(where))


def _batches(folder: Path, step: int) -> Iterator[set[str]]:
    """Yields the paths of a snapshot's arrays, in batches of READ_AT_ONCE bytes."""
    where = folder.absolute() / str(step)
    with _reader() as reader, damage_named(where):
        saved = reader.metadata(where / "arrays").item_metadata.tree
    batch: set[str] = set()
    size = 0
    for path, leaf in saved.items():
        batch.add(path)
        size += int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        if size >= READ_AT_ONCE:
            yield batch
            batch, size = set(), 0
    yield batch


def _read_meta(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, str]]:
    where = folder / str(step)
    with damage_named(where):
        text = (where / "meta" / "metadata").read_bytes()
    try:
        source = parsing.Source("meta", "a JSON object")
        saved = parsing.of_json(text, source, size=None, foreign=True)
    except InputError as error:
        raise integrity.damaged(where, [str(error)]) from None
    return split(saved, where)


def split(saved: dict[str, Any], where: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Splits the saved meta of the snapshot `where` into meta and digests of arrays.

    Returns:
      The meta without the digests, and {path: digest}; a snapshot of an older version
      has no digests.

    Raises:
      DamagedError: the meta is not a JSON object, or does not match its digest.
    """
    if not isinstance(saved, dict):
        fault = f"meta: expected a JSON object, got {saved!r:.40}"
        raise integrity.damaged(where, [fault])
    if DIGESTS not in saved:
        return saved, {}
    meta = {key: value for key, value in saved.items() if key != DIGESTS}
    with damage_named(where):
        digests, actual = saved[DIGESTS], integrity.of_meta(meta)
        if (expected := digests["meta"]) != actual:
            fault = f"meta: digest {actual}, expected {expected}"
            raise integrity.damaged(where, [fault])
        return meta, dict(digests["arrays"])


def doubt(where: Path, digests: Mapping[str, str]) -> str:
    """Says what cannot be checked of a snapshot without faults; "" for nothing."""
    if not digests:
        return "has no digests, being of an older version; not checked"
    if not integrity.has_list(where):
        return f"whole by its digests; {integrity.LIST} is missing"
    return ""


@contextlib.contextmanager
def damage_named(where: Path) -> Iterator[None]:
    """Turns the exceptions of orbax and its formats into a DamagedError.

    Errors of this package and of the devices pass unchanged.
    """
    try:
        yield
    except (InputError, DamagedError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except PermissionError as error:  # the snapshot may be whole
        raise StopError(
            f"{where}: expected a snapshot that can be read, got {error.strerror}; see "
            f"to its permissions"
        ) from error
    except Exception as error:  # orbax and its formats raise any type
        first = (str(error).splitlines() or [""])[0]
        fault = f"{type(error).__name__}: {first:.200}"
        raise integrity.damaged(where, [fault]) from error


def _reader() -> ocp.Checkpointer:
    logging.set_verbosity(logging.FATAL)
    alone = jax.process_index()  # orbax must not wait for other processes
    options = ocp.options.MultiprocessingOptions(
        primary_host=alone, active_processes={alone}
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)
