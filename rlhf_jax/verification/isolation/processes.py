"""The processes of a trial: one for code that is not trusted, one that judges it."""

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
# Runs the `main` of one of our modules, without what the package loads besides.
START = (
    "import sys; sys.modules['rlhf_jax'] = package = type(sys)('rlhf_jax'); "
    "package.__path__ = [sys.argv.pop(1)]; from {0} import main; main()"
)
INTERPRETER = (ways.python(), "-I", "-S", "-B", "-X", "utf8", "-c")
START_SECONDS = 60.0  # an interpreter takes a tenth of one, on a machine that is free
WATCH_SECONDS = 0.05  # between two looks at a folder on disk


class NotStarted(RuntimeError):
    """A process did not start, which is no code's fault."""


class Isolation(NamedTuple):
    """How the code was set apart from the system."""

    way: str  # one of `ways.WAYS`
    why: str  # what failed of those before it

    def __str__(self) -> str:
        if self.way == "none":
            return f"without isolation ({self.why}): limits alone, no security boundary"
        other = f"; {self.why}" if self.why else ""
        return f"apart from files, network and processes, by {self.way}{other}"

    def required(self, *, unsafe: bool) -> Isolation:
        """It, where there is one, or `unsafe` allows that there is none.

        Raises:
          InputError: else.
        """
        if self.way == "none" and not unsafe:
            raise InputError(
                f"expected a system that sets generated code apart, got none "
                f"({self.why}); install bubblewrap, or run on Linux 5.13 or newer with "
                f"libseccomp, or accept the risk by --unsafe-verifier"
            )
        return self


@functools.cache
def isolation(code: str, judge: str) -> Isolation:
    """How generated code is set apart here; runs a program to see.

    Raises:
      NotStarted: not even a process that is not set apart starts.
    """
    reasons: list[str] = []
    limits = {"seconds": START_SECONDS, "memory": 512, "file_size": 1, "disk": 1}
    task = {"code": "", "tests": [], "show": False}
    for way in ways.WAYS:
        try:
            with started(task, code, judge, way=way, limits=limits):
                return Isolation(way, "; ".join(reasons))
        except (OSError, ImportError, NotStarted) as error:
            reasons.append(f"{way}: {error}".split("\n")[0][-200:])
    raise NotStarted("; ".join(reasons))


@contextlib.contextmanager
def started(
    task: dict[str, Any],
    code: str,
    judge: str,
    *,
    way: str,
    limits: dict[str, float],
) -> Iterator[Iterator[str]]:
    """What the judge says, one after the other; its processes end with the block.

    Args:
      task: goes to the judge as JSON, with a nonce that begins each of its messages.
      code, judge: modules whose `main` runs.
      way: one of `ways.WAYS`, for the process of `code`.
      limits: seconds; memory, file_size and disk in MiB.

    Yields:
      What it says behind the nonce; "" if no more, "over: why" beyond a limit.

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
        errors = stack.enter_context(tempfile.TemporaryFile())  # before it is ready
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

        script = START.format(code)
        words = [*before, *INTERPRETER, script, package]
        begin = functools.partial(start, words, {}, stdin=to_read, stdout=to_write)
        if way == "landlock":  # it holds for a thread and what that starts
            with ThreadPoolExecutor(1) as thread:
                thread.submit(ways.landlock, place).result()
                thread.submit(begin).result()
        else:  # `bwrap` would end with such a thread
            begin()
        words = [*INTERPRETER, START.format(judge), OURS]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "pass_fds": pipes}
        judging = start(words, {"pipes": pipes}, stdout=subprocess.DEVNULL, **options)
        for file in (to_read, to_write, report, requests, replies):
            file.close()
        with contextlib.suppress(BrokenPipeError), judging.stdin:
            judging.stdin.write(json.dumps(task).encode())
        said = functools.partial(_next, link, f"{task['nonce']} ")
        if said(time.monotonic() + START_SECONDS) != "ready":
            errors.seek(0)
            why = errors.read().decode(errors="replace").strip()[-300:]
            raise NotStarted(f"the process for generated code did not start: {why}")
        yield _watched(said, place, limits["seconds"], limits["disk"])


def _watched(
    said: Callable[[float], str | None], place: str, seconds: float, disk: float
) -> Iterator[str]:
    end = time.monotonic() + seconds
    while (now := time.monotonic()) <= end:
        line = said(min(end, now + WATCH_SECONDS))
        if line is not None:
            yield line
        if why := folder.too_much(place, disk=disk):
            yield f"over: {why}"
    yield f"over: took longer than {seconds:g} s"


def _next(link: Connection, nonce: str, end: float) -> str | None:
    """What the judge says; "" if it will say no more, None if nothing by `end`."""
    if not link.poll(max(0.0, end - time.monotonic())):
        return None
    try:
        text = link.recv_bytes().decode(errors="replace")
    except (EOFError, OSError):
        return ""
    return text.removeprefix(nonce) if text.startswith(nonce) else ""


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends the process and whatever is in its session, and waits for it."""
    if process.returncode is None:  # else its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
