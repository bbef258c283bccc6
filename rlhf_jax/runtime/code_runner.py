"""Runs generated code and its tests, in a process of its own.

`code_verifier` starts this file as a script; nothing imports it, and it imports nothing
of ours. It reads what to run as JSON from standard input and writes to a descriptor of
its own, so that nothing the code prints is taken for a verdict:

    READY                     limits and guard are in place, the code is next
    NONCE passed [why]        that many tests passed, in order, before one failed

The code runs in a second thread: frames there do not lead to the nonce, which the first
one holds, and the first one ends the process when the time is up. They do lead to the
count of tests that passed: code that walks up the stack to set it gets its verdict.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import builtins
import contextlib
import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

READY = b"ready\n"
MIB = 2**20
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNIX = 1  # the family of socket pairs, which asyncio wakes itself up with
NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000  # of unshare(2)

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


def limit(which: int, most: int) -> None:
    """Lowers a limit of this process; one that the system lacks stays away."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def leave_the_network() -> None:
    """Into a network without devices, where Python can and the system lets us."""
    unshare = getattr(os, "unshare", None)  # of Python 3.12, on Linux
    if unshare is None:
        return
    for flags in (NEW_NETWORK, NEW_NETWORK | NEW_USER):  # as root, or as anybody
        with contextlib.suppress(OSError):
            unshare(flags)
            return


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
        found = real(decode("." if path is None else path))
        return any_of(found == held or starts(found, held + "/") for held in folders)

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


def run(
    code: str, tests: list[types.CodeType], outcome: list[Any], done: _thread.LockType
) -> None:
    """Executes the code and one test after another until one fails.

    Args:
      outcome: [tests passed, why it ended before the last], written here.
      done: released at the end.
    """
    # As they are before the code: it may replace `all` or `isinstance` for everybody.
    pristine, compile_, execute = dict(vars(builtins)), compile, exec
    module = types.ModuleType("solution")
    # Dataclasses and pickle look a class's module up; and this one holds our functions.
    sys.modules["solution"] = sys.modules["__main__"] = module
    names = vars(module)
    try:
        execute(compile_(code, "<code>", "exec", dont_inherit=True), names)
        names["__builtins__"] = pristine
        for test in tests:
            execute(test, names)
            outcome[0] += 1
    except BaseException as error:  # SystemExit too: the tests that are left count
        outcome[1] = describe(error)
    finally:
        done.release()


def describe(error: BaseException) -> str:
    """The error in a line."""
    try:
        lines = f"{type(error).__name__}: {error}".split("\n")
        return lines[0][:300]
    except BaseException:  # its own __str__ raised
        return "an error that cannot be shown"


def main() -> None:
    """Reads the task, runs it and reports; ends the process in any case."""
    task = json.loads(sys.stdin.buffer.read())
    report_to, nonce = int(sys.argv[1]), task["nonce"]
    sys.argv[1:] = []
    write, leave = os.write, os._exit
    folder = os.path.realpath(os.getcwd())

    # The interpreter that is here already needs no more files or processes.
    seconds = task["seconds"]
    limit(resource.RLIMIT_CPU, int(seconds) + 2)
    limit(resource.RLIMIT_AS, task["memory"] * MIB)
    limit(resource.RLIMIT_FSIZE, task["file_size"] * MIB)
    limit(resource.RLIMIT_NOFILE, 64)
    limit(resource.RLIMIT_CORE, 0)
    leave_the_network()
    compiled = [
        compile(test, f"<test {n}>", "exec", dont_inherit=True)
        for n, test in enumerate(task["tests"], start=1)
    ]

    code, outcome = task.pop("code"), [0, ""]
    del task  # the thread's frames are within reach of the code
    go, done = _thread.allocate_lock(), _thread.allocate_lock()
    go.acquire()
    done.acquire()

    def wait_and_run() -> None:
        with go:
            run(code, compiled, outcome, done)

    _thread.start_new_thread(wait_and_run, ())
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    forbid_processes()
    sys.addaudithook(guard(folder))
    write(report_to, READY)
    go.release()

    finished = done.acquire(timeout=seconds)
    passed, why = outcome
    if not finished:
        why = f"took longer than {seconds:g} s"
    # By formatting, which the code cannot have replaced.
    write(report_to, f"{nonce} {passed} {why}".encode("utf-8", "replace"))
    leave(0)


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


if __name__ == "__main__":
    main()
