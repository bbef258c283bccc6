"""Hands parameters over in files, which appear atomically and are removed afterwards.

FOLDER/rlhf-jax-hand-over-HOST-PID-XXXX/version-3       a file, or a checkpoint's folder
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.traverse_util
import numpy as np

from rlhf_jax.checkpoints import shards
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import write_errors

Params = Any
PREFIX = "rlhf-jax-hand-over-"
SEPARATOR = "/"


class HandOverFolder:
    """A sampler's folder, in which each version is written and then removed."""

    def __init__(self, parent: Path | None) -> None:
        """Makes the folder.

        Args:
          parent: an existing folder for it; None is the system's temporary folder.

        Raises:
          InputError: the folder cannot be made.
        """
        try:
            if parent is None:
                parent = Path(tempfile.gettempdir())
            _remove_left_behind(parent)
            prefix = f"{_prefix()}{os.getpid()}-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
            os.chmod(self.path, 0o755)  # a server may run as another user
        except OSError as error:
            raise InputError(
                f"--sampler: expected an existing folder weights= in which files can "
                f"be written, got {parent}: {error.strerror}; make it, or correct the "
                f"path"
            ) from error

    @contextlib.contextmanager
    def version(self, number: int) -> Iterator[Path]:
        """Yields the path of a version, which is removed at the end."""
        path = self.path / f"version-{number}"
        _remove(path)  # left by a hand-over that failed
        try:
            yield path
        finally:
            _remove(path)

    def close(self) -> None:
        """Removes the folder."""
        _remove(self.path)


def write(path: Path, params: Params) -> None:
    """Writes all leaves of nested dicts into one safetensors file, atomically.

    Raises:
      WriteError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with write_errors.writing(path):
        leaves = flax.traverse_util.flatten_dict(params, sep=SEPARATOR)
        flat = {name: np.ascontiguousarray(leaf) for name, leaf in leaves.items()}
        shards.save(flat, partial, metadata={})
        # Atomic: a reader never sees a partial file.
        os.replace(partial, path)


def read(path: Path) -> Params:
    """Reads the nested dicts that `write` wrote.

    Raises:
      InputError: the file is missing or truncated.
    """
    file = shards.open_file(path)
    names = file.keys()  # not a dict, and not iterable
    leaves = {name: file.get_tensor(name) for name in names}
    return flax.traverse_util.unflatten_dict(leaves, sep=SEPARATOR)


def _prefix() -> str:
    """Names this machine in the folder's prefix: `parent` may be shared with others."""
    return f"{PREFIX}{socket.gethostname()}-"


def _remove_left_behind(parent: Path) -> None:
    """Removes the folders of processes of this machine that were killed."""
    for path in parent.glob(f"{glob.escape(_prefix())}*"):
        pid = path.name.removeprefix(_prefix()).partition("-")[0]
        if not pid.isdecimal():
            continue  # of another machine, whose name begins like this one's
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            _remove(path)
        except OSError:
            pass  # a live process of another user


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
