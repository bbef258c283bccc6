"""A process that does one run after another, and keeps what was compiled.

    python -m rlhf_jax.sweeps.worker

Each line of its input names a run, and each line of its output is the exit status of
one: {"module": "rlhf_jax.train.main", "argv": ["ppo", "--out=..."], "log": "..."}, or
with null for the module of a Python file or folder, which is the first of argv.
What the run prints goes to its log. Programs that a module keeps by their options are
compiled by the first run and found by the next, where runs differ in numbers alone.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    """Does the runs that its input names, until that ends."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for line in asked:
        asked_for: dict[str, Any] = json.loads(line)
        log = os.open(asked_for["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        status = run(asked_for["argv"], module=asked_for["module"])
        print(status, file=answers, flush=True)


def run(argv: Sequence[str], *, module: str | None) -> int:
    """One run, as a process of its own would do it.

    Args:
      argv: its arguments, after the path of a file or folder where there is no module.
      module: whose `__main__` part it is, or None.

    Returns:
      Its exit status; 1 where it ends with an exception, whose traceback is printed.
    """
    path = list(sys.path)
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
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.path[:] = path
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
