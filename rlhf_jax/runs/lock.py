"""A lock that admits one process at a time to a run folder, and ends with the process.

    with lock.hold(folder):     makes the folder if it is missing
        ...

The lock is a POSIX record lock on folder/run.lock. The system releases it however the
process ends, kill -9 included, so the run can be resumed at once. NFS extends such
locks to other machines. The file names the holder and is removed with the lock; a file
that a killed process left behind has no effect.

Inside, the same process may hold it again. Of the processes of one run the first takes
it. `rlhf-jax verify` only reads, and takes no lock.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import parsing, write_errors

NAME = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# POSIX would release a lock as soon as any other descriptor of its file were closed.
_held: set[Path] = set()  # folders whose lock this process has


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder; makes the folder, and removes it if it stays empty.

    Raises:
      InputError: another process holds the lock, which the message names; the folder
        cannot be made or written to; or the system has no POSIX locks.
    """
    made, place = _make(folder), folder.resolve()
    try:
        if place in _held:
            yield
            return
        try:
            descriptor = _locked(place)
        except OSError as error:
            raise _unwritable(place, error) from error
        _held.add(place)
        try:
            yield
        finally:
            _held.remove(place)
            with contextlib.suppress(OSError):
                (place / NAME).unlink()
            os.close(descriptor)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


def _make(folder: Path) -> list[Path]:
    """Makes a folder; returns the folders that were missing, innermost first."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a name with NUL is a ValueError
        raise _unwritable(folder, error) from error
    return missing


def _locked(folder: Path) -> int:
    """Opens and locks the folder's lock file, and returns its descriptor."""
    _check_system(folder)
    path = folder / NAME
    while True:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write there")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, path)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                _sign(descriptor, folder)
                return descriptor
        except FileNotFoundError:
            pass  # the holder removed the file meanwhile
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _check_system(folder: Path) -> None:
    if importlib.util.find_spec("fcntl") is None:
        raise InputError(
            f"--out {folder}: expected a POSIX system such as Linux or macOS, whose "
            f"locks keep a second process out of a run folder, got {sys.platform}; "
            f"start the run there, on Windows in WSL 2"
        )


def _lock(descriptor: int, path: Path) -> None:
    import fcntl  # not at the top of the file: only POSIX systems have it

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise InputError(
                f"--out {path.parent}: expected a run folder that no other process "
                f"writes, got one of {_holder(descriptor)}; wait for its end or stop "
                f"it, or give another --out"
            ) from None
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning: the file system of {path.parent} has no locks "
            f"({error.strerror}), so nothing keeps a second process from writing "
            f"to this run; make sure that there is none",
            file=sys.stderr,
        )


def _sign(descriptor: int, folder: Path) -> None:
    """Writes the holder into the file, which also proves that it is writable."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner()).encode() + b"\n", 0)
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()
        raise


def owner() -> dict[str, Any]:
    """Returns the fields of run.lock: this process, its host, and the present time."""
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"process": os.getpid(), "host": socket.gethostname(), "since": now}


def _holder(descriptor: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        source = parsing.Source(NAME, "the process that holds it")
        holder = parsing.of_json(os.pread(descriptor, 1000, 0), source)
        return "process {process} on {host}, since {since}".format(**holder)
    return "another process"


def _unwritable(folder: Path, why: OSError | ValueError) -> InputError:
    reason = write_errors.reason(why) if isinstance(why, OSError) else str(why)
    return InputError(
        f"--out {folder}: expected a folder that can be made and written to, got: "
        f"{reason}; give another --out, or repair that one"
    )
