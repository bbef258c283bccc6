"""The processes of a trial: one runs untrusted code, the other judges it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax.functional.errors import InputError
from rlhf_jax.verification.isolation import folder, ways

OURS = str(Path(__file__).parents[2])
# Runs the `main` of a module in `code/` without importing the rest of the package.
START = (
    "import sys; sys.modules['rlhf_jax'] = package = type(sys)('rlhf_jax'); "
    "package.__path__ = [sys.argv.pop(1)]; "
    "from rlhf_jax.verification.code.{0} import main; main()"
)
INTERPRETER = (ways.python(), "-I", "-S", "-B", "-X", "utf8", "-c")
START_SECONDS = 60.0  # an interpreter takes about 0.1 s on an idle machine
WATCH_SECONDS = 0.05  # between two checks of the folder's size


class NotStarted(RuntimeError):
    """A process did not start, which is not the fault of the generated code."""


class Isolation(NamedTuple):
    """How generated code is isolated from the system."""

    way: str  # one of `ways.WAYS`
    why: str  # why the ways before it failed

    def __str__(self) -> str:
        if self.way == "none":
            return f"without isolation ({self.why}): limits alone, no security boundary"
        other = f"; {self.why}" if self.why else ""
        return f"isolated from files, network and processes by {self.way}{other}"

    def required(self, *, unsafe: bool) -> Isolation:
        """Returns this isolation.

        Raises:
          InputError: the code would run without isolation, and not `unsafe`.
        """
        if self.way == "none" and not unsafe:
            raise InputError(
                f"expected a system that can isolate generated code, got none "
                f"({self.why}); install bubblewrap, or run on Linux 5.13 or newer with "
                f"libseccomp, or accept the risk by --unsafe-verifier"
            )
        return self


@functools.cache
def isolation() -> Isolation:
    """Finds the first way of `ways.WAYS` that works here, by running a program.

    Raises:
      NotStarted: a process does not start even without isolation.
    """
    reasons: list[str] = []
    limits = {"seconds": START_SECONDS, "memory": 512, "file_size": 1, "disk": 1}
    task = {"code": "", "tests": [], "show": False}
    for way in ways.WAYS:
        try:
            with started(task, way=way, limits=limits):
                return Isolation(way, "; ".join(reasons))
        except (OSError, ImportError, NotStarted) as error:
            reasons.append(f"{way}: {error}".split("\n")[0][-200:])
    raise NotStarted("; ".join(reasons))


@contextlib.contextmanager
def started(
    task: dict[str, Any], *, way: str, limits: dict[str, float]
) -> Iterator[Iterator[str]]:
    """Starts both processes, which end with the `with` block.

    Args:
      task: sent to the judge as JSON, with a nonce that begins each of its messages.
      way: one of `ways.WAYS`, for the process of the code.
      limits: seconds; memory, file_size and disk in MiB.

    Yields:
      The judge's messages without the nonce: "" if there will be no more, and
      "over: why" once a limit is exceeded.

    Raises:
      NotStarted: a process did not start.
    """
    task = task | {"nonce": secrets.token_hex(16)}
    with contextlib.ExitStack() as stack:

        def pipe() -> tuple[Connection, Connection]:
            read, write = connection.Pipe(duplex=False)
            return stack.enter_context(read), stack.enter_context(write)

        place = tempfile.mkdtemp(prefix="code-")
        stack.callback(folder.remove, place)
        errors = stack.enter_context(tempfile.TemporaryFile())  # of a failed start
        inside = ways.INSIDE if way == "bubblewrap" else place
        settings = {**limits, "folder": inside, "numpy": ways.numpy_folder()}
        before, package = [], OURS
        if way == "bubblewrap":
            before, package = ways.bubblewrap(place), ways.PACKAGE
        settings["filter"] = "" if way == "none" else ways.seccomp().hex()
        to_read, requests = pipe()
        replies, to_write = pipe()
        link, report = pipe()
        pipes = [file.fileno() for file in (report, requests, replies)]

        def start(words: list[str], own: dict[str, Any], **options: Any) -> Any:
            words = [*words, json.dumps(settings | own)]
            options |= {"stderr": errors, "cwd": place, "env": {}}
            process = subprocess.Popen(words, start_new_session=True, **options)
            stack.callback(_end, process)
            return process

        words = [*before, *INTERPRETER, START.format("runner"), package]
        begin = functools.partial(start, words, {}, stdin=to_read, stdout=to_write)
        if way == "landlock":  # confines a thread and the processes that it starts
            with ThreadPoolExecutor(1) as thread:
                thread.submit(ways.landlock, place).result()
                thread.submit(begin).result()
        else:  # `bwrap --die-with-parent` would end with such a thread
            begin()
        words = [*INTERPRETER, START.format("judge"), OURS]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "pass_fds": pipes}
        judging = start(words, {"pipes": pipes}, stdout=subprocess.DEVNULL, **options)
        for file in (to_read, to_write, report, requests, replies):
            file.close()
        with contextlib.suppress(BrokenPipeError), judging.stdin:
            judging.stdin.write(json.dumps(task).encode())
        next_message = functools.partial(_next_message, link, f"{task['nonce']} ")
        if next_message(time.monotonic() + START_SECONDS) != "ready":
            errors.seek(0)
            why = errors.read().decode(errors="replace").strip()[-300:]
            raise NotStarted(f"the process for generated code did not start: {why}")
        yield _watched(next_message, place, limits["seconds"], limits["disk"])


def _watched(
    next_message: Callable[[float], str | None], place: str, seconds: float, disk: float
) -> Iterator[str]:
    end = time.monotonic() + seconds
    while (now := time.monotonic()) <= end:
        line = next_message(min(end, now + WATCH_SECONDS))
        if line is not None:
            yield line
        if why := folder.too_much(place, disk=disk):
            yield f"over: {why}"
    yield f"over: took longer than {seconds:g} s"


def _next_message(link: Connection, nonce: str, end: float) -> str | None:
    """Returns the judge's next message; "" after the last, None if none by `end`."""
    if not link.poll(max(0.0, end - time.monotonic())):
        return None
    try:
        text = link.recv_bytes().decode(errors="replace")
    except (EOFError, OSError):
        return ""
    return text.removeprefix(nonce) if text.startswith(nonce) else ""


def _end(process: subprocess.Popen[Any]) -> None:
    """Kills the process group of a process, and waits for the process."""
    if process.returncode is None:  # else its id may belong to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
