"""What a process that runs generated code, or its tests, may not ask of Python.

An audit hook and limits of the system. They stop accidents and naive cheating; what
holds where code gets around them is `sandbox`, where the system lets it.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import contextlib
import os
import resource
import sys

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MIB = 2**20
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNIX = 1  # the family of socket pairs, which asyncio wakes itself up with

# Audit events (docs.python.org/3/library/audit_events.html) by what becomes of them.
REFUSED = (
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"),
    *("os.kill", "os.killpg", "os.startfile", "os.unshare", "os.setns"),
    *("subprocess.", "pty.", "socket.", "ctypes.", "syslog.", "resource."),
    *("sys._current_frames", "sys._current_exceptions", "sys.addaudithook"),
    *("sys.setprofile", "sys.settrace", "gc.get_", "_thread.start_", "cpython.remote"),
    *("sqlite3.enable_load_extension", "sqlite3.load_extension"),
)
PATHS = (  # refused outside the folder
    *("os.chdir", "os.chflags", "os.chmod", "os.chown", "os.link", "os.mkdir"),
    *("os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime"),
    *("os.setxattr", "os.removexattr", "sqlite3.connect"),
)
READABLE = ("/dev/null", "/dev/urandom", "/usr/share/zoneinfo")
LOOKED_AT = ("os.listdir", "os.scandir")
# What reaches the system without an audit event.
MODULES = ("ctypes", "_ctypes", "_dbm", "_gdbm", "readline", "_posixshmem")
MODULES += ("_interpreters", "_xxsubinterpreters", "_testcapi", "_testinternalcapi")


def limits(*, seconds: float, memory: int, file_size: int) -> None:
    """Of processor time (seconds), address space and files (bytes)."""
    limit(resource.RLIMIT_CPU, int(seconds) + 2)
    limit(resource.RLIMIT_AS, memory * MIB)
    limit(resource.RLIMIT_FSIZE, file_size * MIB)
    limit(resource.RLIMIT_NOFILE, 64)
    limit(resource.RLIMIT_CORE, 0)


def limit(which: int, most: int) -> None:
    """Lowers a limit of this process; one that the system lacks stays away."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook: no network, no processes, no files outside `folder`.

    The standard library may be read.
    """
    # Bound here: the code may put others in their places.
    real, decode, starts = os.path.realpath, os.fsdecode, str.startswith
    readable = (folder, *map(real, sys.path), *READABLE)
    refused, looked_at, modules = REFUSED, LOOKED_AT, frozenset(MODULES)
    paths, unix, writing = PATHS, UNIX, WRITING
    error, missing, number = PermissionError, ImportError, int
    is_a, any_of, path_types = isinstance, any, (str, bytes, os.PathLike)

    def inside(path: Any, folders: tuple[str, ...]) -> bool:
        if is_a(path, number):
            return True  # open already
        if path == ":memory:":  # sqlite3
            return True
        place = real(decode("." if path is None else path))
        return any_of(
            place == parent or starts(place, parent + "/") for parent in folders
        )

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            folders = (folder, "/dev/null") if flags & writing else readable
            if not inside(path, folders):
                raise error(f"{path!r} is outside the folder of this code")
        elif event == "import":
            if args[0] in modules:
                raise missing(f"{args[0]} is not there for this code")
        elif event in looked_at:
            if not inside(args[0], readable):
                raise error(f"{args[0]!r} is outside the folder of this code")
        elif starts(event, paths):
            for path in args[:2]:
                if is_a(path, path_types) and not inside(path, (folder,)):
                    raise error(f"{path!r} is outside the folder of this code")
        elif starts(event, refused) and not (
            event == "socket.__new__" and args[1] == unix
        ):
            raise error(f"{event} is not allowed to this code")

    return hook


def forbid_processes() -> None:
    """What has no audit event: processes, threads, device files, process handles."""
    limit(resource.RLIMIT_NPROC, 0)  # which root does not mind

    def refuse(*args: Any, **kwargs: Any) -> int:
        raise PermissionError("processes, threads and nodes are not for this code")

    _posixsubprocess.__dict__["fork_exec"] = refuse
    for name in ("start_new_thread", "start_new", "start_joinable_thread"):
        _thread.__dict__[name] = refuse
    modules = (sys.modules.get(name) for name in ("os", "posix", "signal", "_signal"))
    for module in filter(None, modules):
        for name in ("mknod", "mkfifo", "pidfd_open", "pidfd_send_signal"):
            if name in vars(module):
                module.__dict__[name] = refuse
