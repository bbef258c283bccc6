"""What could not be written, in one line: a full disk, a folder without permission.

    with write_errors.writing(path):
        path.write_text(text)

turns an OSError into a `WriteError`, which the command line prints with what is safe
and how to go on, and exits with status 1. What libraries raise of a failed write from
threads of their own is recognised by `reason`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs.snapshots import resume

# What the system says of a place that takes no writes, not of a mistake in a program.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
FAILING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
NAMED = (*NO_ROOM, *NOT_ALLOWED, *FAILING)


class WriteError(StopError):
    """A file of the run could not be written; what is on the disk already is whole."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(f"{path} could not be written: {why}")
        self.remedy = "see to that disk"
        if why in map(os.strerror, NO_ROOM):
            self.remedy = "make room there"
        elif why in map(os.strerror, NOT_ALLOWED):
            self.remedy = "let this user write there"


def reason(error: BaseException) -> str | None:
    """What the system said of a failed write; None where the error is of another kind.

    An OSError says it itself; others that were raised from one, or that quote the
    system as tensorstore does, are looked through.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.strerror
        # safetensors writes "(os error 28)", tensorstore "[os_error_code='28']".
        if code := re.search(r"\bos[ _]error(?:_code=')? ?(\d+)", str(cause)):
            return os.strerror(int(code[1]))
        for code in NAMED:
            if os.strerror(code) in str(cause):
                return os.strerror(code)
        cause = cause.__cause__ or cause.__context__
    return None


def check_place(
    path: Path, *, option: str, called: str, is_own: Callable[[Path], bool]
) -> None:
    """Refuses a file that is not to be written, before the work for it is done.

    Args:
      called: what is written there, as "report".
      is_own: whether a file that is there is one of those.

    Raises:
      InputError: the folder is missing, or what is there would be lost.
    """
    got = None
    try:
        if not path.parent.is_dir():
            raise InputError(
                f"{option} {path}: expected a file in a folder that exists, got no "
                f"{path.parent}; make it first"
            )
        path.lstat()
        if path.is_dir():
            got = "a folder; name a file in it"
        elif not path.is_file():
            got = "no regular file; choose another"
        elif not is_own(path):
            got = "another file, which would be lost; choose another name or remove it"
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        if isinstance(error, InputError):
            raise
        got = f"{getattr(error, 'strerror', error)}; choose another"
    if got is not None:
        shown = f"{path!s:.200}".replace("\0", "\\0")
        raise InputError(
            f"{option} {shown}: expected a new file or an earlier {called}, got {got}"
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Any failed write inside is a WriteError that names `path`.

    Raises:
      WriteError: an exception that `reason` knows; the others pass.
    """
    try:
        yield
    except (InputError, StopError):
        raise  # told already
    except Exception as error:
        why = reason(error)
        if why is None:
            raise
        raise WriteError(path, why) from error


@contextlib.contextmanager
def of_run(folder: Path) -> Iterator[None]:
    """A failed write of the experiment's own inside is a WriteError too.

    No room is told wherever it is missing; a permission only inside the run's folder,
    as elsewhere it is about a file to read.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        inside = isinstance(name, str | Path) and (
            Path(name).absolute().is_relative_to(folder.absolute())
        )
        if error.errno not in NO_ROOM and not (inside and error.errno in NAMED):
            raise
        path = "a file" if name is None else name
        raise WriteError(path, str(error.strerror)) from error


def safe(folder: Path) -> str:
    """What a run folder holds that a failed write left whole, in a few words."""
    parts = [
        f"snapshot {newest} of {stage.name}"
        for stage in sorted((folder / "snapshots").glob("*"))
        if (newest := resume.newest(stage))
    ]
    if not parts:
        return "no snapshot is complete yet"
    rows = 0
    with contextlib.suppress(OSError):
        rows = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    if rows:
        parts.append(f"{rows} rows of metrics.jsonl")
    return f"safe are {' and '.join(parts)}"


def _left_behind(
    error: BaseException | None,
    source: Any,
    *,
    coroutine: type = types.CoroutineType,
    scheduling: types.CodeType = asyncio.BaseEventLoop.call_soon_threadsafe.__code__,
) -> bool:
    if isinstance(source, coroutine):
        return "orbax" in source.cr_code.co_filename
    trace = None if error is None else error.__traceback__
    return trace is not None and trace.tb_frame.f_code is scheduling


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """Keeps what orbax's threads leave behind after a failed write off the terminal.

    Their error itself is raised where the snapshot is waited for. The other writes of
    that snapshot then end on an event loop that is closed, which Python would tell in a
    traceback each, now and as it shuts down.
    """
    before = sys.unraisablehook

    # Bound here, as Python clears modules before it is done.
    def hook(unraisable: Any, left_behind: Any = _left_behind) -> None:
        if not left_behind(unraisable.exc_value, unraisable.object):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except WriteError:
        raise  # with the hook in place until the process ends
    except BaseException:
        sys.unraisablehook = before
        raise
    sys.unraisablehook = before
