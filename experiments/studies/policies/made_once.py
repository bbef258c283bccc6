"""Arrays that several runs share, made by the first of them that comes.

FOLDER/arrays.safetensors     there once they are made
FOLDER/made.lock              held by the run that makes them
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
    """What `make` returns, from the disk where it was made before.

    Runs that begin at once wait for the first. One that is killed leaves its folder to
    the next, which makes them again, or goes on where `make` can.

    Args:
      folder: of these arrays alone.
      make: returns arrays of JAX or NumPy.
      check: called while another run is waited for; raises where this one is to stop.

    Returns:
      The same to the last bit, of NumPy.

    Raises:
      InputError: the file is there and cannot be read.
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
    """The folder of what the runs of a seed share: `world`_DIGEST/seed_N.

    Args:
      prepared: where such folders are.
      world: the first part of its name.
      options: of the run that makes it. Those that change nothing of the result are not
        in the digest, and the versions of the library and of JAX are.
      further: what else it depends on.
    """
    alike = run_config.to_json(options)
    for name in run_config.MAY_DIFFER | {"seed"}:
        alike.pop(name, None)
    versions = run_folder.versions()
    made_by = [alike, *further, versions.get("rlhf_jax"), versions.get("jax")]
    digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()
    return prepared / f"{world}_{digest[:8]}" / f"seed_{options.seed}"


def _write(arrays: Arrays, file: Path) -> None:
    """The file, whole or not at all."""
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
