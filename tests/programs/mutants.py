"""Mutation testing: breaks one line at a time and checks that a quick test fails.

    python tests/programs/mutants.py --number 300 --jobs 2 --record mutants.jsonl
    python tests/programs/mutants.py --record mutants.jsonl --summary

Lists every mutant of functional/ and algorithms/ (`mutations.py`), and draws some of
them with a seed, evenly over the modules. The quick tests run once with every
statement traced, which says for each test what it reaches and how long it takes. A
mutant then meets the passing tests that reach its statement, or its module if it is no
statement of a function: first the mirrored test file, then the other files of the same
folder, then the rest. The other tests of these files come last. The first failure kills
it, and so does running out of time, which is recorded as such. Everything happens in
copies of the checkout. A second start with the same record goes on where the first one
stopped.

Libraries are imported once, and each run is a fork (Linux). Programs that XLA compiled
before are read from a cache, which only the first, unbroken run writes.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import multiprocessing
import os
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import forked_tests
import mutations

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("functional", "algorithms")
UNCOPIED = {".git", ".venv", ".mutants", "site", "runs", "build"}  # of the top folder
LONGEST_FILE = 900  # CPU seconds of the tests of one file
LATER = 10  # more than any distance of a test file


def copied(source: Path, tree: Path) -> Path:
    """A copy of the checkout, with compiled modules."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {"__pycache__"} | (UNCOPIED if Path(folder) == source else set())

    if not tree.exists():
        unfinished = tree.with_name(f"{tree.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished, ignore=left_out)
        compileall.compile_dir(unfinished, quiet=1)
        unfinished.rename(tree)
    return tree


def modules() -> dict[str, str]:
    """{path in the checkout: source} of the mutated modules."""
    folder = ROOT / "rlhf_jax"
    paths = [
        path for name in PACKAGES for path in sorted((folder / name).rglob("*.py"))
    ]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def all_mutants() -> list[mutations.Mutant]:
    sources = [path.read_text() for path in (ROOT / "rlhf_jax").rglob("*.py")]
    optional = mutations.defaults(sources)
    return [
        mutant
        for file, source in modules().items()
        for mutant in mutations.mutants(file, source, optional)
    ]


def draw(
    mutants: list[mutations.Mutant], *, number: int, seed: int
) -> list[mutations.Mutant]:
    """Draws without replacement, in turn from each module and each of its lines."""
    by_file = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    turns = []
    for file, listed in sorted(by_file.items()):
        source = random.Random(f"{seed} {file}")
        source.shuffle(listed)
        of_line: Counter = Counter()
        ranked = []
        for mutant in listed:
            ranked.append((of_line[mutant.line], mutant))
            of_line[mutant.line] += 1
        ranked.sort(key=lambda pair: pair[0])  # stable: lines in the order of the draw
        turns += [(turn, source.random(), m) for turn, (_, m) in enumerate(ranked)]
    return [mutant for _, _, mutant in sorted(turns, key=lambda one: one[:2])][:number]


def trace(work: Path, folders: Sequence[str], *, seconds: float) -> dict:
    """{test: its seconds and statements}, from one run of every file by itself."""
    saved = work / "reached.json"
    before = json.loads(saved.read_text()) if saved.exists() else {}
    tests: dict[str, dict] = {}
    sources = json.dumps(modules())
    tree = copied(ROOT, work / "tree_traced")
    for file, source in modules().items():
        (tree / file).write_text(mutations.traced(file, source))
    paths = [tree / folder for folder in folders]
    for path in sorted(p for top in paths for p in [top, *top.rglob("test_*.py")]):
        if path.is_dir():
            continue
        name = str(path.relative_to(tree))
        digest = hashlib.sha256((sources + path.read_text()).encode()).hexdigest()
        key = f"{name} {digest}"
        if key not in before:
            status, reached = forked_tests.run_tests(
                tree,
                [name],
                forked_tests.Reached(),
                seconds=seconds,
                keep_programs=True,
            )
            before[key] = reached or {}
            print(f"{name}: {status}, {len(before[key])} tests", flush=True)
            saved.write_text(json.dumps(before))
        tests[name] = before[key]
    every = {name: t for file in tests.values() for name, t in file.items() if t}
    for test in every.values():
        test["statements"] = {tuple(statement) for statement in test["statements"]}
    return every


def stages(mutant: mutations.Mutant, tests: dict) -> list[list[tuple[str, float]]]:
    """(test, its seconds) for a mutant, nearest files first, short tests first."""
    place = mutant.file, mutant.statement

    def reaches(statements: set) -> bool:
        if mutant.statement is None:
            return any(file == mutant.file for file, _ in statements)
        return place in statements

    package_path = Path(mutant.file).relative_to("rlhf_jax")
    mirror = Path("tests") / package_path.with_name(f"test_{package_path.name}")
    files = defaultdict(list)
    for name in tests:
        files[Path(name.partition("::")[0])].append(name)

    def distance(file: Path) -> int:
        if file == mirror:
            return 0
        if file.parent == mirror.parent:
            return 1
        return 2 if file.parts[1] == mirror.parts[1] else 3

    steps = defaultdict(list)
    unreached = not any(reaches(test["statements"]) for test in tests.values())
    for file, names in files.items():
        near = {name for name in names if reaches(tests[name]["statements"])}
        if mutant.statement is None and unreached and distance(file) < 2:
            near = set(names)  # of a module without a function, such as a recipe
        # What one test traces under `jit`, and reaches, others of its file run.
        far = set(names) - near if near else set()
        for more, chosen in ((0, near), (LATER, far)):
            timed = sorted((tests[name]["seconds"], name) for name in chosen)
            total = sum(seconds for seconds, _ in timed)
            steps[distance(file) + more].append((total, str(file), timed))
    return [
        [
            (name, seconds)
            for *_, timed in sorted(steps[step])
            for seconds, name in timed
        ]
        for step in sorted(steps)
    ]


def meet(
    job: tuple[mutations.Mutant, list[list[tuple[str, float]]]],
    *,
    work: Path,
    seconds: float,
) -> dict:
    """The record of a mutant and of its stages of tests."""
    mutant, steps = job
    tree = copied(work / "tree_whole", work / f"tree_{os.getpid()}")
    path = tree / mutant.file
    whole, times = path.read_bytes(), path.stat()
    path.write_bytes(whole[: mutant.start] + mutant.text.encode() + whole[mutant.end :])
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    outcome, by, met, spent = "survived", None, 0, 0.0
    for step in steps:
        taken = []
        for name, cost in step:
            if spent + cost <= seconds:
                spent += cost
                taken.append(name)
        met += len(taken)
        if taken:
            arguments = ["-x", *sorted({name.partition("::")[0] for name in taken})]
            chosen = forked_tests.Chosen(taken)
            limit = 60 + 3 * spent
            status, failed = forked_tests.run_tests(
                tree, arguments, chosen, seconds=limit
            )
            if status not in (0, 5):
                outcome, by = "killed", str((failed or [f"status {status}"])[0])
                break
    path.write_bytes(whole)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    every = sum(map(len, steps))
    counts = {"met": met, "of": every}
    return {"mutant": mutant.name, "outcome": outcome, "by": by, **counts}


def summary(records: list[dict]) -> str:
    """A table of counts per package, and the surviving mutants."""
    lines = ["| package | mutants | killed | of them by time | killed, % |"]
    lines += ["|---|---|---|---|---|"]
    for package in (*PACKAGES, ""):
        own = [r for r in records if r["mutant"].startswith(f"rlhf_jax/{package}")]
        killed = [r for r in own if r["outcome"] == "killed"]
        late = sum(r["by"] == "status timeout" for r in killed)
        share = 100 * len(killed) / max(1, len(own))
        name = package or "both"
        lines.append(f"| {name} | {len(own)} | {len(killed)} | {late} | {share:.1f} |")
    survivors = [r for r in records if r["outcome"] != "killed"]
    lines += [
        "",
        *(f"- {r['mutant']} ({r['met']} of {r['of']} tests)" for r in survivors),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--number", type=int, default=300, help="mutants to draw (300)")
    add("--seed", type=int, default=0, help="seed of the draw (0)")
    add("--only", default="*", help="pattern of the mutants to keep, FILE:LINE: ... ")
    add("--jobs", type=int, default=1, help="mutants at a time (1)")
    add("--seconds", type=float, default=60, help="CPU seconds of tests a mutant (60)")
    add("--tests", nargs="+", default=["tests"], help="folders or files of tests")
    add("--except", nargs="+", default=[], help="tests to leave out", dest="left_out")
    add("--record", type=Path, default=Path("mutants.jsonl"), help="(mutants.jsonl)")
    add("--work", type=Path, default=Path("/tmp/mutants"), help="folder of the copies")
    add("--list", action="store_true", help="print the drawn mutants and end")
    add("--again", action="store_true", help="meet the recorded survivors once more")
    add("--summary", action="store_true", help="print the table of the record and end")
    options = parser.parse_args()
    lines = options.record.read_text().splitlines() if options.record.exists() else []
    records = {record["mutant"]: record for record in map(json.loads, lines)}
    if options.summary:
        print(summary(list(records.values())))
        return
    drawn = draw(all_mutants(), number=options.number, seed=options.seed)
    drawn = [mutant for mutant in drawn if fnmatch(mutant.name, options.only)]
    if options.list:
        print("\n".join(mutant.name for mutant in drawn))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    for folder in options.work.glob("tree_*"):  # of an earlier state of the checkout
        (shutil.rmtree if folder.is_dir() else Path.unlink)(folder)
    copied(ROOT, options.work / "tree_whole")
    forked_tests.import_libraries(options.work / "programs")
    tests = trace(options.work, options.tests, seconds=LONGEST_FILE)
    tests = {name: test for name, test in tests.items() if name not in options.left_out}
    settled = {
        name
        for name, record in records.items()
        if record["outcome"] == "killed" or not options.again
    }
    left = [(m, stages(m, tests)) for m in drawn if m.name not in settled]
    meet_one = partial(meet, work=options.work, seconds=options.seconds)
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for record in pool.imap_unordered(meet_one, left):
            records[record["mutant"]] = record
            with options.record.open("a") as out:
                out.write(json.dumps(record) + "\n")
            print(
                f"{record['outcome']} {record['mutant']} by {record['by']}", flush=True
            )
    killers = sorted(
        {r["by"] for r in records.values() if r["by"] and "::" in r["by"]}
        & tests.keys()
    )
    control = forked_tests.Chosen(killers)
    files = sorted({name.partition("::")[0] for name in killers})
    whole = options.work / "tree_whole"
    status, failed = forked_tests.run_tests(whole, files, control, seconds=LONGEST_FILE)
    print(summary(list(records.values())))
    print(f"\nThe {len(killers)} killing tests without a mutant: {status}, {failed}")


if __name__ == "__main__":
    main()
