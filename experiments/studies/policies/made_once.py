"""Arrays that several runs share, created by the first run that needs them.

FOLDER/arrays.safetensors     the arrays, written whole
FOLDER/made.lock              held by the run that creates them
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder as run_folder
from rlhf_jax.runs import run_config, write_errors
from rlhf_jax.runs.run_config import RunConfig
from studies import locks

Arrays = Mapping[str, Any]  # dicts of arrays within dicts


def made_once(
    folder: Path, make: Callable[[], Arrays], *, check: Callable[[], None]
) -> Arrays:
    """Returns the arrays of `make`, read from disk if they were created before.

    Runs that start at once wait for the first. If it is killed, the next run calls
    `make` again, which may resume in the same folder.

    Args:
      folder: a folder for these arrays alone.
      make: returns JAX or NumPy arrays.
      check: called while waiting for another run; it raises if this run should stop.

    Returns:
      NumPy arrays, equal to those of `make` to the last bit.

    Raises:
      InputError: the file exists and cannot be read.
    """
    file = folder / "arrays.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "made.lock"
        with locks.held(lock, prepares=folder, check=check):
            if not file.exists():
                _write(make(), file)
    try:
        flat = safetensors.load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{file}: expected arrays that an earlier run made, got: {error}; remove "
            f"{folder}, and they are made again"
        ) from error
    return traverse_util.unflatten_dict(flat, sep="/")


def folder_of(
    prepared: Path, world: str, options: RunConfig, *further: int | str
) -> Path:
    """The folder that the runs of a seed share: `world`_DIGEST/seed_N.

    Args:
      prepared: the parent of such folders.
      world: the first part of the folder's name.
      options: options of the run that creates the arrays. The digest includes those
        that can change the result, and the versions of the library and of JAX.
      further: other values on which the arrays depend.
    """
    alike = run_config.to_json(options)
    for name in run_config.MAY_DIFFER | {"seed"}:
        alike.pop(name, None)
    versions = run_folder.versions()
    made_by = [alike, *further, versions.get("rlhf_jax"), versions.get("jax")]
    digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()
    return prepared / f"{world}_{digest[:8]}" / f"seed_{options.seed}"


def _write(arrays: Arrays, file: Path) -> None:
    """Writes the file, whole or not at all."""
    flat = traverse_util.flatten_dict(jax.device_get(arrays), sep="/")
    partial = file.with_suffix(".partial")
    with write_errors.writing(partial), partial.open("wb") as written:
        written.write(
            safetensors.save(
                {name: np.ascontiguousarray(leaf) for name, leaf in flat.items()}
            )
        )
        written.flush()
        os.fsync(written.fileno())
        os.replace(partial, file)
