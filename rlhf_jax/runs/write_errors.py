"""Failed writes as one-line errors: a full disk, a folder without permission.

    with write_errors.writing(path):
        path.write_text(text)

turns an OSError into a `WriteError`. The command line prints it with what was saved and
how to resume, and exits with status 1. `reason` also recognises failed writes in the
exceptions of libraries that write in their own threads.
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
from rlhf_jax.runs import parsing
from rlhf_jax.runs.snapshots import resume

# Errors of a place that takes no writes, as opposed to mistakes in a program.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
FAILING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
NAMED = (*NO_ROOM, *NOT_ALLOWED, *FAILING)


class WriteError(StopError):
    """A file of the run could not be written; earlier files are whole."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(f"{path} could not be written: {why}")
        self.remedy = "check that disk"
        if why in map(os.strerror, NO_ROOM):
            self.remedy = "make room there"
        elif why in map(os.strerror, NOT_ALLOWED):
            self.remedy = "let this user write there"


def reason(error: BaseException) -> str | None:
    """Returns the system's message about a failed write; None for any other error.

    The message is taken from an OSError, from one among its causes, or from the text of
    a library's error that quotes the system, as tensorstore's do.
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
    """Checks that an output file may be written, before the work for it is done.

    Args:
      option: name of the option, for messages.
      called: what is written, such as "report".
      is_own: path -> whether an existing file is such an output, and may be replaced.

    Raises:
      InputError: the folder is missing, or another file would be lost.
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
        raise InputError(
            f"{option} {parsing.shown(path)}: expected a new file or an earlier "
            f"{called}, got {got}"
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write inside into a WriteError that names `path`.

    Raises:
      WriteError: `reason` recognised the exception; others pass unchanged.
    """
    try:
        yield
    except (InputError, StopError):
        raise  # already has its message
    except Exception as error:
        why = reason(error)
        if why is None:
            raise
        raise WriteError(path, why) from error


@contextlib.contextmanager
def of_run(folder: Path) -> Iterator[None]:
    """Turns a failed write of the experiment's own code into a WriteError too.

    A full disk counts anywhere. A missing permission counts only inside the run's
    folder, since elsewhere it may be about a file to read.
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
    """Names the snapshots and rows of a run folder that a failed write left whole."""
    parts = [
        f"snapshot {newest} of {stage.name}"
        for stage in resume.stages(folder)
        if (newest := resume.newest(stage))
    ]
    if not parts:
        return "no snapshot is complete yet"
    rows = 0
    with contextlib.suppress(OSError):
        rows = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    if rows:
        parts.append(f"{rows} rows of metrics.jsonl")
    return f"safe: {' and '.join(parts)}"


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
    """Suppresses tracebacks from orbax's threads after a failed write.

    The error itself is raised where the run waits for the snapshot. The other writes of
    that snapshot then end on a closed event loop, and Python would print a traceback
    for each, now and as it shuts down.
    """
    before = sys.unraisablehook

    # Bound as a default, because Python clears modules as it shuts down.
    def hook(unraisable: Any, left_behind: Any = _left_behind) -> None:
        if not left_behind(unraisable.exc_value, unraisable.object):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except WriteError:
        raise  # and keep the hook until the process ends
    except BaseException:
        sys.unraisablehook = before
        raise
    sys.unraisablehook = before
