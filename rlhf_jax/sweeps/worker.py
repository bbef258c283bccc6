"""A process that executes one run after another, and keeps compiled programs.

    python -m rlhf_jax.sweeps.worker ANSWERS

Each line of its input describes a run: {"module": "rlhf_jax.train.main", "argv":
["ppo", "--out=..."], "log": "..."}. If the module is null, argv begins with a Python
file or folder. The output of a run goes to its log. The process writes the exit status
of each run as a line to the file descriptor ANSWERS. If it is `full`, it writes "STATUS
last" and ends.

After each run the working directory, environment, module path and signal handlers are
restored. Other changes by a run stay: modules, JAX's configuration, threads.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST = "last"  # follows the status of a process's last run
MAPPINGS = Path("/proc/self/maps")  # memory mappings of this process, one per line
MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")


def main() -> None:
    """Executes the runs on the standard input, until it ends."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(int(sys.argv[1]), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        status = run(request["argv"], module=request["module"])
        last = full()
        print(status, LAST if last else "", file=answers, flush=True)
        if last:
            return


def full() -> bool:
    """Returns whether this process has half of its limit of memory mappings.

    Every compiled program takes some. At the limit LLVM gets no memory for a program,
    and the process ends by SIGSEGV.
    """
    try:
        most = int(MOST_MAPPINGS.read_text())
        return 2 * len(MAPPINGS.read_bytes().splitlines()) >= most
    except OSError:  # not Linux; no limit is known
        return False


def run(argv: Sequence[str], *, module: str | None) -> int:
    """Executes a run as its own process would; returns the exit status.

    The run is the `__main__` part of the module, or else the file or folder that is the
    first argument. An exception prints its traceback, and gives status 1.
    """
    here, path, environment = Path.cwd(), list(sys.path), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        if module is not None:
            sys.argv = [module, *argv]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            if Path(argv[0]).is_file():  # `run_path` adds a folder to the path itself
                sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF  # the byte that the system keeps
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(here)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


if __name__ == "__main__":
    main()
