"""A process that does one run after another, and keeps what was compiled.

    python -m rlhf_jax.sweeps.worker ANSWERS

Each line of its input names a run, and each line of the file descriptor ANSWERS is the
exit status of one: {"module": "rlhf_jax.train.main", "argv": ["ppo", "--out=..."],
"log": "..."}, or with null for the module of a Python file or folder, the first of
argv. What a run prints goes to its log. A process that is `full` answers "STATUS last",
and ends.

After each run the working directory, the environment, the path of modules and the
handlers of signals are those of before. What else a run leaves behind stays: modules,
JAX's configuration, threads.
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
LAST = "last"  # beside the status of the last run that a process does
MAPPINGS = Path("/proc/self/maps")  # of this process, a line each; Linux has it
MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")


def main() -> None:
    """Does the runs that its input names, until that ends."""
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
    """Whether this process has half of the mappings that the system gives it.

    Every compiled program takes some. Beyond them LLVM finds no memory for a program,
    and the process ends by SIGSEGV.
    """
    try:
        most = int(MOST_MAPPINGS.read_text())
        return 2 * len(MAPPINGS.read_bytes().splitlines()) >= most
    except OSError:  # another system, where nothing is known of a bound
        return False


def run(argv: Sequence[str], *, module: str | None) -> int:
    """One run, as a process of its own would do it; its exit status.

    Without a module, whose `__main__` part it is, the first argument is a file or
    folder. An exception ends it with status 1, and its traceback is printed.
    """
    here, path, environment = Path.cwd(), list(sys.path), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        if module is not None:
            sys.argv = [module, *argv]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            if Path(argv[0]).is_file():  # a folder puts itself there
                sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF  # what the system keeps of it
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
