"""Measures seconds and memory for large inputs, and checks bounds.

    python experiments benchmarks.load --out runs/load

Each case creates its input and then does the work of a command on it, in a process of
its own. The benchmark measures the CPU seconds of that process without its start, and
its peak memory with JAX and transformers. The exit status is 1 if a bound is broken.

Expect half a minute for 200,000 prompts and less than one for a page of 10,000 runs.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from benchmarks import reading
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.runs import report as tables

HERE = Path(__file__).resolve().parents[1]
SEEDS = 5  # runs of one config
STEPS = 50  # steps of a run
OPTIONS = {  # about as many as a trainer has, in groups
    f"group_{n}": {f"option_{k}": k / 10 for k in range(10)} for n in range(12)
}
VERSIONS = {"python": "3.11", "rlhf_jax": "0.2.0", "jax": "0.10.2"}
SWEEP = """
trainer = "ppo"
seeds = [0, 1]
[options]
model = "m"
prompts = "p.jsonl"
reward = "r:score"
[grid]
kl_coef = [{values}]
[measures]
score = {{ metric = "objective/scores", last = 10 }}
[claims]
"the penalty costs reward" = "score(kl_coef={first}) > score(kl_coef={last})"
"""


class Case(NamedTuple):
    """An input, the work on it, and its bounds."""

    number: int  # number of rows, runs, cells or bytes
    make: Callable[[Path, int], None]
    work: Callable[[Path], dict[str, float]]  # returns further figures
    seconds: float  # bound on CPU seconds
    mb: float  # bound on peak MB
    figures: dict[str, float]  # bounds on further figures


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_run(place: Path, *, kl_coef: float, seed: int, steps: int = STEPS) -> None:
    """Writes a run folder as `rlhf-jax ppo` does, without snapshots and a model."""
    place.mkdir(parents=True)
    rng = np.random.default_rng([seed, int(1e6 * kl_coef)])
    config = {"out": str(place), "seed": seed, "kl": {"kl_coef": kl_coef}} | OPTIONS
    folder.write_json(
        place / folder.CONFIG, {"config": config, "versions": {**VERSIONS}}
    )
    names = ("objective/scores", "judge/score", "objective/kl", "objective/entropy")
    names += ("response/length", "loss/policy", "policy/approxkl", "drift/relative")
    at = [{"stage": "ppo", "step": step} for step in range(steps)]
    numbers = rng.normal(size=(steps, len(names)))
    write_rows(
        place / "metrics.jsonl",
        (
            row | dict(zip(names, of, strict=True))
            for row, of in zip(at, map(np.ndarray.tolist, numbers), strict=True)
        ),
    )
    phases = {"sample": 1.0, "learn": 2.0}
    timed = ({**row, "seconds": 3.5, "phases": phases} for row in at)
    write_rows(place / "timings.jsonl", timed)
    tokens = [f"{word} " for word in rng.choice(reading.WORDS, 24)]
    sample = {
        "prompt": "What is it?",
        "response": "".join(tokens),
        "score": float(rng.normal()),
        "tokens": tokens,
        "logprobs": (-rng.exponential(size=24)).round(4).tolist(),
        "ref_logprobs": (-rng.exponential(size=24)).round(4).tolist(),
    }
    write_rows(place / "samples.jsonl", (row | sample for row in at[::10]))
    folder.write_summary(place, {"alarms": [], "reference_verified": True})


# 200,000 prompts


def make_prompts(place: Path, count: int) -> None:
    reading.write(place / "prompts.jsonl", rows=count, chat=False, seed=0)


def read_prompts(place: Path) -> dict[str, float]:
    from rlhf_jax.data import batches, digests, encoding, files

    rows = files.read_prompts(place / "prompts.jsonl")
    _, prompts = encoding.encode_prompts(
        TextContract(reading.words()), rows, limits=Limits(64)
    )
    digests.of_tokens(prompts)
    made = batches.prompt_batches(prompts, batch_size=16, seed=0, pad_id=0)
    return {"shape": float(made[0].tokens.shape[0])}


# 10,000 runs on a page


def make_runs(place: Path, count: int) -> None:
    for number in range(count):
        config, seed = divmod(number, SEEDS)
        name = f"{config}/seed_{seed}"
        write_run(place / "runs" / name, kl_coef=config / count, seed=seed)


def write_report(place: Path) -> dict[str, float]:
    from rlhf_jax.train import report

    runs = tuple(sorted(path.parent for path in place.rglob(folder.CONFIG)))
    report.main(report.Config(runs=runs, html=place / "report.html"))
    return {"page_mb": (place / "report.html").stat().st_size / 1e6}


# 500 cells of a sweep


def make_sweep(place: Path, count: int) -> None:
    from rlhf_jax.sweeps import declaration, planned

    values = [number / count for number in range(count)]
    file = place / "sweep.toml"
    shown = ", ".join(map(str, values))
    file.write_text(SWEEP.format(values=shown, first=values[0], last=values[-1]))
    sweep = declaration.read(file)
    planned.begin(sweep, out=place / "out")
    for run in planned.runs_of(sweep, out=place / "out"):
        [(_, kl_coef)] = run.cell.values
        assert isinstance(kl_coef, float)
        write_run(run.folder, kl_coef=kl_coef, seed=run.seed)


def collect_sweep(place: Path) -> dict[str, float]:
    from rlhf_jax.train import sweep
    from rlhf_jax.train.queries import paper

    sweep.main(sweep.Config(file=place / "sweep.toml", out=place / "out"))
    paper.main(paper.Config(sweep=place / "out", out=place / "paper"))
    return {}


# 1,000,000 rows of metrics


def make_long(place: Path, count: int) -> None:
    write_run(place / "run", kl_coef=0.1, seed=0, steps=count)


def resume_long(place: Path) -> dict[str, float]:
    """Reads the rows before the snapshot, as a resume does."""
    from rlhf_jax.runs import metrics

    steps = (place / "run" / "metrics.jsonl").read_bytes().count(b"\n")
    with metrics.Recorder(place / "run") as record:
        record.begin("ppo", step=steps)
        return {"rows": record.rows["metrics"]}


def verify_long(place: Path) -> dict[str, float]:
    from rlhf_jax.train.queries import verify

    verify.verify(place / "run")
    return {}


# a line of 50 MB


def make_line(place: Path, count: int) -> None:
    text = "a wor" * (count // 5)
    write_rows(place / "prompts.jsonl", [{"prompt": "w1 w2"}, {"prompt": text}])
    write_run(place / "run", kl_coef=0.1, seed=0)
    with (place / "run" / "samples.jsonl").open("a", encoding="utf-8") as file:
        row = {"stage": "ppo", "step": STEPS - 1, "prompt": text, "response": text}
        file.write(json.dumps(row) + "\n")
    folder.write_summary(place / "run", {"alarms": []})


def read_line(place: Path) -> dict[str, float]:
    from rlhf_jax.data import files

    rows = files.read_prompts(place / "prompts.jsonl")
    return {"rows": len(rows)} | write_report(place)


PAGE = {"page_mb": 20.0}
CASES = {
    "200,000 prompts": Case(200_000, make_prompts, read_prompts, 60, 2000, {}),
    "10,000 runs, report": Case(10_000, make_runs, write_report, 60, 2000, PAGE),
    "500 cells, sweep and paper": Case(500, make_sweep, collect_sweep, 120, 2000, {}),
    "1,000,000 rows, resume": Case(1_000_000, make_long, resume_long, 90, 2000, {}),
    "1,000,000 rows, verify": Case(1_000_000, make_long, verify_long, 15, 2000, {}),
    "1,000,000 rows, report": Case(1_000_000, make_long, write_report, 90, 4000, PAGE),
    "a line of 50 MB": Case(50_000_000, make_line, read_line, 30, 2000, PAGE),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    out: Path
    """Folder of figures.json and of the inputs, which are removed at the end."""
    cases: tuple[str, ...] = tuple(CASES)
    """Cases to measure."""
    share: float = 1.0
    """Size of the inputs, as a share of the case's own."""
    work: bool = False
    """Whether one case works on an existing input, in this process, and no more."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.cases if name not in CASES]:
            raise InputError(
                f"--cases: expected some of {'; '.join(CASES)}, got {unknown[0]}; "
                f"leave it out for all"
            )


def worked(case: Case, place: Path) -> dict[str, float]:
    """Does the work of a case in this process and measures it."""
    began = time.process_time()
    figures = case.work(place)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"seconds": seconds, "mb": peak, **figures}


def measured(name: str, *, options: Config) -> dict[str, Any]:
    """Measures a case in a process of its own, and lists its broken bounds.

    Raises:
      InputError: the process failed.
    """
    case, place = CASES[name], options.out / "input"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    case.make(place, max(1, round(case.number * options.share)))
    command = [sys.executable, str(HERE), "benchmarks.load", f"--out={options.out}"]
    command += ["--work", "--cases", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(place)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise InputError(
            f"{name}: expected status 0, got {done.returncode}:\n{last}\nmend it"
        )
    figures = json.loads(done.stdout.splitlines()[-1])
    most = {"seconds": case.seconds, "mb": case.mb, **case.figures}
    broken = [
        f"{name}: {figures[one]:.0f} {one}, expected at most {limit:g}"
        for one, limit in most.items()
        if figures[one] > limit
    ]
    return {"case": name, **figures, "most": most, "broken": broken}


def main(options: Config) -> None:
    """Prints the table and writes OUT/figures.json."""
    if options.work:
        [name] = options.cases
        print(json.dumps(worked(CASES[name], options.out / "input")))
        return
    rows = [measured(name, options=options) for name in options.cases]
    tables.table(
        "CPU seconds and MB, and what they may be at most",
        ("case", "seconds", "at most", "MB", "at most", "page [MB]"),
        [
            (
                row["case"],
                *(f"{row['seconds']:.1f}", f"{row['most']['seconds']:g}"),
                *(f"{row['mb']:.0f}", f"{row['most']['mb']:g}"),
                f"{row['page_mb']:.1f}" if "page_mb" in row else "",
            )
            for row in rows
        ],
    )
    text = json.dumps({"rows": rows}, indent=1) + "\n"
    (options.out / "figures.json").write_text(text, encoding="utf-8")
    if broken := [line for row in rows for line in row["broken"]]:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
