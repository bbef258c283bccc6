"""Breaks each formula on purpose and checks that the test of it fails.

    python tests/programs/formula_mutants.py                     # all, two at a time
    python tests/programs/formula_mutants.py --share 3/8         # every eighth
    python tests/programs/formula_mutants.py --only "KTO*"

`formulas.toml` has them: a line of a file, what stands there instead, and the test
that has to fail, a case of the conformance matrix where there is one. Everything
happens in copies of the checkout (`mutants.copied`). Exits with status 1 where a mutant
lives, and where a test fails on the unbroken tree, which it runs first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tomllib
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import NamedTuple

import forked_tests
import mutants

FORMULAS = Path(__file__).with_name("formulas.toml")
MATRIX = "tests/algorithms/test_update_formulas.py"
SECONDS = 120  # of CPU time for one mutant's test


class Formula(NamedTuple):
    """An entry of `formulas.toml`."""

    name: str
    file: str  # within rlhf_jax/
    old: str
    new: str
    test: str  # a file or folder, or the start of a test's name


def formulas() -> list[Formula]:
    rows = tomllib.loads(FORMULAS.read_text())["mutant"]
    of_case = f"{MATRIX}::test_an_update_is_that_of_its_formula["
    return [
        Formula(
            row["formula"],
            row["file"],
            row["old"],
            row["new"],
            of_case + row["case"] if "case" in row else row["test"],
        )
        for row in rows
    ]


class Within(forked_tests.Chosen):
    """Pytest plugin: runs the tests with this prefix and records failures."""

    def __init__(self, starts: list[str]) -> None:
        super().__init__([])
        self.starts = tuple(starts)
        self.number = 0

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if item.nodeid.startswith(self.starts)]
        self.number = len(items)

    def result(self) -> list[str]:
        return self.failures if self.number else ["no test has this name"]


def run(tree: Path, tests: list[str], *, keep_programs: bool = False) -> list[str]:
    """The tests that failed, or the reason why they ended."""
    files = sorted({test.partition("::")[0] for test in tests})
    every_tier = ["-m", ""]  # or a test that is slow would not be run, and kill all
    status, failed = forked_tests.run_tests(
        tree,
        [*every_tier, *files] if keep_programs else [*every_tier, "-x", *files],
        Within(tests),
        seconds=SECONDS * len(files),
        keep_programs=keep_programs,
    )
    return failed or ([] if status == 0 else [f"status {status}"])


def meet(formula: Formula, *, work: Path) -> tuple[Formula, str | None]:
    """The first test that fails on a mutant; None if none does."""
    tree = mutants.copied(work / "tree_whole", work / f"tree_{os.getpid()}")
    path = tree / "rlhf_jax" / formula.file
    whole, times = path.read_text(), path.stat()
    path.write_text(whole.replace(formula.old, formula.new))
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    failed = run(tree, [formula.test])
    path.write_text(whole)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return formula, failed[0] if failed else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--share", default="0/1", help="I/N: every N-th from the I-th on (0/1: all)")
    add("--only", default="*", help="pattern of their names")
    add("--jobs", type=int, default=2, help="mutants at a time (2)")
    add("--work", type=Path, default=Path("/tmp/formula_mutants"), help="of the copies")
    options = parser.parse_args()
    first, count = map(int, options.share.split("/"))
    chosen = [f for f in formulas()[first::count] if fnmatch(f.name, options.only)]
    options.work.mkdir(parents=True, exist_ok=True)
    for folder in options.work.glob("tree_*"):  # of an earlier state of the checkout
        (shutil.rmtree if folder.is_dir() else Path.unlink)(folder)
    whole = mutants.copied(mutants.ROOT, options.work / "tree_whole")
    forked_tests.import_libraries(options.work / "programs")
    tests = sorted({formula.test for formula in chosen})
    failed = run(whole, tests, keep_programs=True)
    if failed:
        sys.exit(f"without a mutant: {', '.join(failed)}")
    lived = 0
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for formula, killer in pool.imap_unordered(
            partial(meet, work=options.work), chosen
        ):
            lived += killer is None
            ended = "lives" if killer is None else f"dies by {killer}"
            print(f"{formula.name}: {ended}", flush=True)
    print(f"{len(chosen) - lived} of {len(chosen)} die")
    sys.exit(lived > 0)


if __name__ == "__main__":
    main()
