r"""Does GRPO learn the same from a sampler outside the trainer?

    python experiments studies.outside_sampler --vllm VENV/bin/vllm \
        --out runs/outside_sampler

A model of two layers learns sums of two digits from few demonstrations, and then by
`rlhf-jax grpo` with a verifier. The same runs use three samplers:

here       our decoder in the trainer's program
process    our decoder in a process of its own; weights pass through files
server     vLLM, started by this study, which reloads every version from safetensors

Each sampler also runs a step behind (--max-staleness 1). Then the server receives the
weights as a checkpoint without a separate output head, the usual form of a tied model,
and as one with a head.

Measured are the share of all sums that greedy responses have right; the scores of the
first step and of the last ten; the distance of the server's log-probs to the trainer's
after every hand-over; and whether runs with the process equal those with our decoder to
the bit.

Expect, for seeds 0 to 2: runs with the process equal those with our decoder; runs with
the server learn as much, at distances of at most 1e-5 nats per token; and vLLM 0.32
does not reload a tied head, which the check after the hand-over detects. Without --vllm
the server is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_jax import hf
from rlhf_jax.algorithms.grpo import GRPO, GroupRecipe
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import StopError
from rlhf_jax.runs import command_line, folder, metrics, report, run, run_config
from rlhf_jax.samplers import served
from rlhf_jax.samplers.server import ServerSampler
from rlhf_jax.train import trainer
from rlhf_jax.train.config.models import Reference, Start
from rlhf_jax.train.config.optimizer import AdamW, Cosine, Optimizer
from rlhf_jax.train.config.prompts import Batch, Prompts
from rlhf_jax.train.config.rewards import Rewards, Verifier
from rlhf_jax.train.config.sampler import Here, Process, Sampler, Sampling, Server
from rlhf_jax.train.config.supervised import Rows
from rlhf_jax.train.config.watch import Watch
from rlhf_jax.train.methods import grpo
from rlhf_jax.train.supervised import sft
from studies.turns.preparation import characters, write
from studies.vllm_server import serving

Row = dict[str, Any]
CONTEXT = 32
SUMS = [(a, b) for a in range(10) for b in range(10)]
LAST = 10  # number of final steps whose scores are averaged
GONE = 1e9  # nats per token, a tolerance that accepts every distance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    vllm: str | None = None
    """Path of the program `vllm` in its environment; None leaves the server out."""
    num_seeds: int = 3
    """Number of seeds, of models and samples: --seed, --seed + 1, ..."""
    num_steps: int = 80
    """Iterations of GRPO."""
    batch_size: int = 256
    """Responses per iteration, in groups of 8."""
    sft_steps: int = 160
    """Updates on demonstrations, before GRPO."""
    learning_rate: float = 1e-3
    """Initial learning rate of GRPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_seeds=self.num_seeds,
            num_steps=self.num_steps,
            sft_steps=self.sft_steps,
            learning_rate=self.learning_rate,
        )


def prepare(options: Config) -> None:
    """Writes OUT/data, OUT/tokenizer and, per seed, a model OUT/sft/SEED/model."""
    data = options.out / "data"
    data.mkdir()
    characters().save_pretrained(options.out / "tokenizer")
    write(
        data / "demonstrations.jsonl",
        [{"prompt": f"{a}+{b}=", "response": f"{a + b}"} for a, b in SUMS],
    )
    write(
        data / "sums.jsonl",
        [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a, b in SUMS],
    )
    for seed in range(options.seed, options.seed + options.num_seeds):
        sft.main(
            sft.Config(
                start=sft.Start(
                    tokenizer=str(options.out / "tokenizer"),
                    fresh_hidden_size=64,
                    fresh_num_layers=2,
                    fresh_num_heads=2,  # vLLM on a CPU lacks heads of size 16
                    fresh_max_positions=CONTEXT,
                ),
                data=sft.Demonstrations(data=str(data / "demonstrations.jsonl")),
                optimizer=Optimizer(
                    learning_rate=1e-3,
                    optimizer=AdamW(),
                    schedule=Cosine(warmup=0.05),
                ),
                batch=Rows(batch_size=32),
                num_steps=options.sft_steps,
                seed=seed,
                progress=False,
                out=options.out / "sft" / f"{seed}",
            )
        )


def train(
    options: Config, *, seed: int, name: str, sampler: Sampler, behind: int
) -> Path:
    """Runs GRPO with a sampler and returns the run folder."""
    out = options.out / "runs" / f"{name}-{seed}"
    sums = str(options.out / "data" / "sums.jsonl")
    trainer.main(
        grpo.Config(
            start=Start(model=str(options.out / "sft" / f"{seed}" / "model")),
            data=Prompts(prompts=sums),
            rewards=Rewards(verifier=Verifier("exact"), num_workers=1),
            reference=Reference(reference="none"),
            batch=Batch(batch_size=options.batch_size, max_new_tokens=4),
            sampler=Sampling(sampler=sampler, max_staleness=behind or None),
            method=GroupRecipe(group_size=8, num_epochs=2, temperature=1.0),
            optimizer=Optimizer(learning_rate=options.learning_rate),
            watch=Watch(held_out=sums, held_out_rows=len(SUMS)),
            num_steps=options.num_steps,
            seed=seed,
            progress=False,
            out=out,
        )
    )
    return out


def measured(out: Path) -> Row:
    """The scores of a run, and the distances and seconds of its hand-overs."""
    rows = metrics.read(out / "metrics.jsonl")
    waits = [row.get("waits") or {} for row in metrics.read(out / "timings.jsonl")]
    summary = json.loads((out / "summary.json").read_text())
    row: Row = {
        "before": summary["held_out_score_before"],
        "right": summary["held_out_score_after"],
        "score_first": rows[0]["objective/scores"],
        "score": float(np.mean([row["objective/scores"] for row in rows[-LAST:]])),
        "mismatch": max(row["policy/sampler_mismatch"] for row in rows),
        "seconds": summary["seconds"],
    }
    distances = [r["policy/sampler_check"] for r in rows if "policy/sampler_check" in r]
    if distances:
        row["largest_distance"] = max(distances)
    for what in ("hand_over", "draw"):
        if what in waits[-1]:
            row[f"{what}_seconds"] = float(np.median([wait[what] for wait in waits]))
    return row


def bits(out: Path) -> Any:
    """The parts of a run that must be equal: metrics and weights."""
    rows = metrics.read(out / "metrics.jsonl")
    for row in rows:
        row.pop("policy/sampler_check", None)
    return rows, (out / "model" / "model.safetensors").read_bytes()


def heads(url: str, before: Path, after: Path) -> list[Row]:
    """Distances after hand-overs of a tied policy, with and without a stored head.

    Args:
      before, after: checkpoints of the start and of the end of a run.
    """
    model, start = hf.load(before)
    _, end = hf.load(after)
    recipe = GRPO(
        model=model,
        policy_optimizer=None,  # type: ignore[arg-type] (nothing is updated)
        max_new_tokens=16,
        stop_ids=(0,),
        temperature=1.0,
    )
    rows = []
    for name, save in {"no head": hf.save, "head": served.save}.items():
        sampler = ServerSampler(url, recipe, tolerance=GONE, save=save)
        with sampler:
            with contextlib.closing(ServerSampler(url, recipe, tolerance=GONE)) as own:
                own.hand_over(jax.device_get(start), version=0)
            distance = sampler.hand_over(jax.device_get(end), version=1)
        rows.append({"checkpoint": name, "tied": model.tied_head, "distance": distance})
    return rows


def main(options: Config) -> None:
    """Runs every sampler for every seed, and prints means and standard deviations."""
    started = time.perf_counter()
    rows: list[Row] = []
    of_heads: list[Row] = []
    with run.Run(options, num_steps={}) as job, contextlib.ExitStack() as stack:
        prepare(options)
        ways: dict[str, Sampler] = {"here": Here(), "process": Process()}
        last = options.seed + options.num_seeds - 1
        model = options.out / "sft" / f"{last}" / "model"
        if options.vllm is not None:
            log = options.out / "server.log"
            serves = serving(options.vllm, model, context=CONTEXT, log=log)
            ways["server"] = Server(stack.enter_context(serves))
        for seed in range(options.seed, last + 1):
            for behind in (0, 1):
                for way, sampler in ways.items():
                    name = f"{way}-{behind}"
                    out = train(
                        options, seed=seed, name=name, sampler=sampler, behind=behind
                    )
                    row = {"seed": seed, "sampler": way, "behind": behind}
                    row |= measured(out)
                    if way == "process":
                        ours = options.out / "runs" / f"here-{behind}-{seed}"
                        row["equal_bits"] = bits(out) == bits(ours)
                    rows.append(row)
                    print(row, flush=True)
        if isinstance(server := ways.get("server"), Server):
            ended = options.out / "runs" / f"here-0-{last}" / "model"
            of_heads = heads(server.address, model, ended)
    show(rows, of_heads)
    seconds = time.perf_counter() - started
    summary = {"rows": rows, "heads": of_heads, "seconds": seconds}
    folder.write_summary(job.folder, summary)
    print(f"{seconds:.0f} s; figures in {job.folder}")
    if not all(row.get("equal_bits", True) for row in rows):
        raise StopError(
            "expected runs with --sampler process to be those with our decoder here to "
            "the bit, got others; see the rows above"
        )


def show(rows: list[Row], of_heads: list[Row]) -> None:
    """Prints mean ± standard deviation over the seeds."""

    def spread(way: tuple[str, int], name: str) -> str:
        values = [
            row[name]
            for row in rows
            if (row["sampler"], row["behind"]) == way and name in row
        ]
        if not values:
            return ""
        return f"{np.mean(values):.2f} ± {np.std(values):.2f}"

    names = ("before", "right", "score_first", "score", "hand_over_seconds")
    report.table(
        "Sums right before and after, score of samples at first and at last",
        ("sampler, steps behind", "before", "right", "first", "last", "hand-over [s]"),
        [
            (f"{way}, {behind}", *(spread((way, behind), name) for name in names))
            for way, behind in dict.fromkeys((r["sampler"], r["behind"]) for r in rows)
        ],
    )
    for row in of_heads:
        assert math.isfinite(row["distance"])
        print(
            f"checkpoint with {row['checkpoint']}: {row['distance']:.3g} nats per token"
        )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
