"""A run folder for one process at a time, by a lock that dies with its process.

    with run_lock.hold(folder):     makes the folder where it is missing
        ...

It is a POSIX record lock on folder/run.lock. The system gives it back when the process
ends in whatever way, kill -9 included, so that a resume right after it is let in. NFS
passes such locks on to the other machines. The file says who holds it, and goes with
the lock; one that a killed process left behind means nothing.

Within a process the lock may be taken again. Of the processes of one run the first
takes it. `rlhf-jax verify` reads only, and takes none.
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

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import parsing, write_errors

NAME = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# By folder, with how often it is held: any other opened descriptor of the file would
# give the lock back when it is closed.
_locks: dict[Path, tuple[int, int]] = {}


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which is made, and removed if nothing came into it.

    Raises:
      InputError: another process holds it; says which. The folder cannot be made or
        written to. The system has no POSIX locks.
    """
    made = _make(folder)
    try:
        take(folder)
        try:
            yield
        finally:
            give_back(folder)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # something is in it
                path.rmdir()


def take(folder: Path) -> None:
    """Takes the lock of a folder that is there, until `give_back` or the process ends.

    Raises:
      InputError: another process holds it, or the folder cannot be written to.
    """
    folder = folder.resolve()
    if folder in _locks:
        descriptor, count = _locks[folder]
    else:
        try:
            descriptor, count = _locked(folder), 0
        except OSError as error:
            raise _unwritable(folder, error) from error
    _locks[folder] = descriptor, count + 1


def give_back(folder: Path) -> None:
    """Undoes one `take`; the last one gives the lock back, and removes its file."""
    folder = folder.resolve()
    descriptor, count = _locks.pop(folder)
    if count > 1:
        _locks[folder] = descriptor, count - 1
        return
    with contextlib.suppress(OSError):
        (folder / NAME).unlink()
    os.close(descriptor)


def _make(folder: Path) -> list[Path]:
    """The folders that were missing, innermost first."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a name with NUL is a ValueError
        raise _unwritable(folder, error) from error
    return missing


def _locked(folder: Path) -> int:
    """A descriptor of the folder's file, locked."""
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
            pass  # its holder was just giving it back
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
            f"({error.strerror}), so nothing would stop a second process from writing "
            f"to this run; see to it that there is none",
            file=sys.stderr,
        )


def _sign(descriptor: int, folder: Path) -> None:
    """Writes who holds the lock; also the proof that the folder can be written to."""
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    owner = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            (folder / NAME).unlink()
        raise


def _holder(descriptor: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        source = parsing.Source(NAME, "the process that holds it")
        owner = parsing.of_json(os.pread(descriptor, 1000, 0), source)
        return f"process {owner['process']} on {owner['host']}, since {owner['since']}"
    return "another process"


def _unwritable(folder: Path, why: OSError | ValueError) -> InputError:
    reason = write_errors.reason(why) if isinstance(why, OSError) else str(why)
    return InputError(
        f"--out {folder}: expected a folder that can be made and written to, got: "
        f"{reason}; give another --out, or see to that one"
    )
