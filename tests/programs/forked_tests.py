"""Runs tests in a fork, which already has the libraries imported here."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

LIBRARIES = ("jax", "flax.struct", "optax", "transformers", "orbax.checkpoint", "chex")
CLOCK = 6  # seconds on the clock for each second of CPU time that a run may take
NEVER = 1e9  # seconds


def import_libraries(programs: Path) -> None:
    """Imports the libraries of all tests; `programs` is the folder of XLA's cache."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Plugins want to be imported by pytest itself, and transformers imports one.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    warnings.filterwarnings("ignore", message=".*os.fork")
    for name in LIBRARIES:
        import_module(name)
    import jax

    if jax.__version_info__ < (0, 11):  # see `quick_compilation` in conftest.py
        jax.config.update("jax_compilation_cache_dir", str(programs))


class Reached:
    """Pytest plugin: statements reached by each passing test, and its CPU seconds."""

    def __init__(self) -> None:
        self.tests: dict[str, dict] = {}
        self.start = 0.0
        self.statements: set[tuple[str, int]] = set()
        builtins.reached = self.reach  # pyright: ignore

    def reach(self, statement: tuple[str, int]) -> None:
        self.statements.add(statement)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.start = time.process_time()
        self.statements.clear()

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed:
            self.tests[report.nodeid] = {}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self.tests:
            seconds = time.process_time() - self.start
            statements = sorted(self.statements)
            self.tests[nodeid] = {"seconds": seconds, "statements": statements}

    def result(self) -> dict:
        return self.tests


class Chosen:
    """Pytest plugin: runs these tests in this order and records failures."""

    def __init__(self, names: Sequence[str]) -> None:
        self.order = {name: index for index, name in enumerate(names)}
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failures.append(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failures.append(f"collection of {report.nodeid}")

    def result(self) -> list[str]:
        return self.failures


def run_tests(
    tree: Path,
    arguments: Sequence[str],
    plugin: Reached | Chosen,
    *,
    seconds: float,
    keep_programs: bool = False,
) -> tuple[int | str, Any]:
    """Runs pytest in `tree`, a copy of the checkout, within a limit of CPU seconds.

    Returns:
      (pytest's exit status or what ended it, the plugin's result).
    """
    out = tree.parent / f"{tree.name}.json"
    out.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        status = 3
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            limit = int(seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            log = os.open(
                out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            )
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            import jax
            import pytest

            name = "jax_persistent_cache_min_compile_time_secs"
            jax.config.update(name, 0.0 if keep_programs else NEVER)
            options = ["-q", "-p", "no:cacheprovider", "--tb=short"]
            status = int(pytest.main([*options, *arguments], plugins=[plugin]))
            out.write_text(json.dumps(plugin.result()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + CLOCK * seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the tests started
    result = json.loads(out.read_text()) if out.exists() else None
    if os.WIFSIGNALED(ended[1]):
        number = os.WTERMSIG(ended[1])
        late = number in (signal.SIGXCPU, signal.SIGKILL)
        return "timeout" if late else signal.Signals(number).name, result
    return os.WEXITSTATUS(ended[1]), result
