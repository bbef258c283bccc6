"""Arrays that several runs share, made by the first of them that comes.

FOLDER/arrays.safetensors     there once they are made
FOLDER/made.lock              held while they are; it goes with its process
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from safetensors import numpy as safetensors

from rlhf_jax.runs import run_config, write_errors
from rlhf_jax.runs.run_config import RunConfig

Arrays = Mapping[str, Any]  # dicts of arrays within dicts


def made_once(folder: Path, make: Callable[[], Arrays]) -> Arrays:
    """What `make` returns, from the disk where it was made before.

    Runs that begin at once wait for the first. One that is killed leaves its folder to
    the next, which makes them again, or goes on where `make` can.

    Args:
      folder: of these arrays alone.
      make: returns arrays of JAX or NumPy.

    Returns:
      The same to the last bit, of NumPy.
    """
    file = folder / "arrays.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder / "made.lock"):
        if not file.exists():
            flat = traverse_util.flatten_dict(jax.device_get(make()), sep="/")
            arrays = {name: np.ascontiguousarray(leaf) for name, leaf in flat.items()}
            partial = file.with_suffix(".partial")
            with write_errors.writing(partial):
                safetensors.save_file(arrays, partial)
                os.replace(partial, file)
    return traverse_util.unflatten_dict(safetensors.load_file(file), sep="/")


def folder_of(
    prepared: Path, world: str, options: RunConfig, *further: int | str
) -> Path:
    """The folder of what the runs of a seed share: `world`_DIGEST/seed_N.

    Args:
      prepared: where such folders are.
      world: the first part of its name.
      options: of the run that makes it. Those that change nothing of the result are not
        in the digest.
      further: what else it depends on.
    """
    alike = run_config.to_json(options)
    for name in run_config.MAY_DIFFER | {"seed"}:
        alike.pop(name, None)
    digest = hashlib.sha256(json.dumps([alike, *further]).encode()).hexdigest()
    return prepared / f"{world}_{digest[:8]}" / f"seed_{options.seed}"


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Waits for a lock, and holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
