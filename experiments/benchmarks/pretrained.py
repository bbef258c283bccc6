"""Compares GRPO and PPO on a real model with peers: seconds, start and memory.

    python experiments pretrained.smollm2 --out runs/smollm2
    python experiments benchmarks.pretrained --model runs/smollm2 --output grpo.json
    python experiments benchmarks.pretrained --model runs/smollm2 --method ppo \
        --output ppo.json

GRPO with all parameters is compared with TRL's GRPOTrainer, and PPO with LoRA of rank
16 and a value head on the policy with a trainer by hand in PyTorch.

All train the same checkpoint in float32 on the same prompts: sums of two numbers from
10 to 29, through the chat template, with 32 responses of at most 8 tokens and one
update per step; GRPO has 8 responses per prompt. All prompts have the same length.
Responses end by EOS, and it is checked that their mean lengths agree. The reward is 1
for the right number minus 0.01 per token, because the model is rarely right in 8 tokens
and equal rewards have no gradient. `rlhf-jax grpo` takes part with `--packing auto`,
which reads the prompt of a group once, and without.

In `benchmarks.iteration` participants create a GPT-2 and stay in memory during other
turns. Here they read a checkpoint and take some GB each, and a whole command is
measured. So a turn is a process, and only one runs at a time. In each round every
participant runs twice:

    1 step            start: from the command to the end of the first update
    --num-steps       seconds of a step, the mean of those after the second; memory

Before the rounds each runs 1 more step for the cold start; rlhf_jax then has an empty
compilation cache. Memory is the peak resident memory of a process and its descendants,
until the end of the last step (`peak`) and until the end (`whole`), which saves the
model and, in rlhf_jax, a snapshot with the optimizer. `peers/trl_grpo.py` and
`peers/torch_lora_ppo.py` state what the peers do differently. Linux only.

If rlhf_jax exceeds its bounds (`BOUNDS`), the last table shows it and the exit status
is 1.

Expect half an hour on 2 idle CPU cores, and up to 8 GB of memory and 3 GB of disk.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import commands, iteration, tables
from benchmarks.environments import (
    ENVIRONMENTS,
    FOLDER,
    PeerError,
    python_of,
    surroundings,
)
from benchmarks.peers import line_protocol
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import report

Method = Literal["grpo", "ppo"]
OURS: dict[Method, dict[str, tuple[str, ...]]] = {
    "grpo": {
        "rlhf_jax, packed": ("--group-size", "8", "--packing", "auto"),
        "rlhf_jax": ("--group-size", "8"),
    },
    "ppo": {
        "rlhf_jax": (
            *("--lora", "16,alpha=16", "--shared-trunk"),
            *("--num-epochs", "1", "--num-minibatches", "1"),
        )
    },
}
PEERS: dict[Method, tuple[str, str]] = {  # (name, file in peers/)
    "grpo": ("trl", "trl_grpo.py"),
    "ppo": ("PyTorch by hand", "torch_lora_ppo.py"),
}
LEARNING_RATE: dict[Method, float] = {"grpo": 2e-6, "ppo": 2e-4}
ENVIRONMENT = "trl-grpo"  # environment of every peer
BOUNDS: dict[Method, dict[str, float]] = {  # largest ratio of rlhf_jax to the peer
    "grpo": {"step": 0.3, "start": 1.0, "peak": 0.7, "cold start": 1.3},
    "ppo": {"step": 1.0, "peak": 0.7},
}
TOLERANCE = 0.2  # relative, of the mean length of the sampled responses
MEASURED = {  # {key: its column}
    "step": "step [s]",
    "start": "start [s]",
    "peak": "peak [MiB]",
    "whole": "whole [MiB]",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    model: Path
    """Checkpoint folder written by `pretrained.smollm2`."""
    method: Method = "grpo"
    """Method to measure: GRPO with all parameters, or PPO with LoRA."""
    peer: bool = True
    """Run the peer too."""
    rounds: int = 3
    """Turns of each participant."""
    num_steps: int = 8
    """Steps of a turn; the first two are not counted."""
    environments: Path = Path("~/.cache/rlhf_jax/benchmark")
    """Folder of the peers' virtual environment, which is created if missing."""
    output: Path | None = None
    """JSON file for all figures, versions and the machine; None writes none."""
    limit: float = 1800.0
    """Longest duration of a run, seconds."""

    def __post_init__(self) -> None:
        checks.positive(rounds=self.rounds, limit=self.limit)
        checks.positive(**{"num_steps - 2": self.num_steps - commands.SKIPPED})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Settings that all participants share."""

    model: str
    prompts: str  # JSONL
    learning_rate: float
    batch_size: int = 32  # responses per step
    max_new_tokens: int = 8
    temperature: float = 1.0
    kl_coef: float = 0.02
    length_penalty: float = 0.01  # reward units per token


Command = Callable[..., list[str]]  # (*, num_steps, out) -> the command


def sums() -> list[dict[str, Any]]:
    """The rows of prompts and answers."""
    return [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": f"What is {one} + {other}? "
                    "Answer with the number alone.",
                }
            ],
            "answer": one + other,
        }
        for one, other in itertools.product(range(10, 30), repeat=2)
    ]


def ours(method: Method, task: Task, *options: str, cache: Path) -> Command:
    """The command of `rlhf-jax`, with compiled programs cached in `cache`."""
    fields = {"--" + k.replace("_", "-"): v for k, v in vars(task).items()}
    del fields["--length-penalty"]
    fields |= {"--schedule": "constant", "--compilation-cache": cache}
    command = [sys.executable, "-m", "rlhf_jax.train.main", method, "--no-progress"]
    command += [str(word) for pair in fields.items() for word in pair]
    short = f"short=length,weight={-task.length_penalty}"
    command += ["--rewards", "right=verifier:integer", short]

    def of(*, num_steps: int, out: Path) -> list[str]:
        numbers = ["--num-steps", str(num_steps), "--out", str(out)]
        return [*command, *options, *numbers]

    return of


def theirs(method: Method, task: Task, *, python: Path) -> Command:
    """The command of the peer, which takes its settings as JSON."""
    _, file = PEERS[method]
    own = {"group_size": 8} if method == "grpo" else {"lora": 16}

    def of(*, num_steps: int, out: Path) -> list[str]:
        settings = vars(task) | own | {"num_steps": num_steps, "out": str(out)}
        return [str(python), str(FOLDER / file), json.dumps(settings)]

    return of


def check(work: Mapping[str, float], *, first: Mapping[str, float]) -> None:
    """Raises PeerError if `work` differs from the first participant's, or is none."""
    prompt, response = work["prompt/length"], work["response/length"]
    expected = first["response/length"]
    wrong = []
    if prompt != first["prompt/length"]:
        wrong.append(f"prompts of {first['prompt/length']:g} tokens, got {prompt:g}")
    if abs(response - expected) > TOLERANCE * expected:
        wrong.append(f"responses of about {expected:.3g} tokens, got {response:.3g}")
    if not work["drift/relative"] > 0:
        wrong.append("parameters that moved")
    if wrong:
        raise PeerError(
            f"expected {'; '.join(wrong)}: it does other work, so that its times say "
            f"nothing; mend peers/, or leave it out"
        )


def measure(
    made: Mapping[str, Command], *, options: Config, scratch: Path
) -> dict[str, Any]:
    """{"participants": {name: {"cold": seconds, "rounds": [...]}}, "failed": ...}."""
    measured: dict[str, Any] = {}
    failed: dict[str, str] = {}
    first: dict[str, float] = {}

    def once(name: str, *, num_steps: int) -> dict[str, Any]:
        environment = None if name in OURS[options.method] else ENVIRONMENT
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            out = Path(folder) / "run"
            return commands.run(
                made[name](num_steps=num_steps, out=out),
                out=out,
                num_steps=num_steps,
                limit=options.limit,
                variables=surroundings(environment) | {"TMPDIR": str(scratch)},
            )

    for turn in range(options.rounds + 1):
        for name in made:
            if name in failed:
                continue
            began = time.perf_counter()
            try:
                start = once(name, num_steps=1)["start"]
                if turn == 0:
                    measured[name] = {"cold": start, "rounds": []}
                else:
                    steps = once(name, num_steps=options.num_steps)
                    first = first or steps["work"]
                    check(steps["work"], first=first)
                    measured[name]["rounds"].append(steps | {"start": start})
            except PeerError as error:
                failed[name] = f"{name}: {error}"
                print(f"error: {failed[name]}", flush=True)
                measured.pop(name, None)
            else:
                seconds = time.perf_counter() - began
                what = f"round {turn}" if turn else "cold start"
                print(f"{name}: {what}, {seconds:.0f} s", flush=True)
    return {"participants": measured, "failed": failed}


def show(participants: Mapping[str, Any], *, method: Method, task: Task) -> bool:
    """Prints the tables; returns whether the first of rlhf_jax's keeps to `BOUNDS`."""
    peer, _ = PEERS[method]
    rounds = {name: each["rounds"] for name, each in participants.items()}
    report.table(
        f"{method}, {task.batch_size} responses per step; median (least - most)",
        ("", *MEASURED.values(), "cold start [s]"),
        [
            (
                name,
                *(tables.spread(lines, key) for key in MEASURED),
                participants[name]["cold"],
            )
            for name, lines in rounds.items()
        ],
    )
    if peer in rounds:
        report.table(
            f"Ours / {peer}, median (least - most) of the rounds' ratios",
            ("", *MEASURED.values(), "cold start [s]"),
            [
                (
                    name,
                    *(tables.ratio(lines, rounds[peer], key) for key in MEASURED),
                    participants[name]["cold"] / participants[peer]["cold"],
                )
                for name, lines in rounds.items()
                if name != peer
            ],
        )
    report.table(
        "Work, last round: means over steps",
        ("", "prompt [tokens]", "response [tokens]", "score", "drift"),
        [(name, *lines[-1]["work"].values()) for name, lines in rounds.items()],
    )
    first = next(iter(OURS[method]))
    if not {first, peer} <= {*rounds}:
        return True
    cold = participants[first]["cold"] / participants[peer]["cold"]
    ratios = {
        key: tables.paired_ratio(rounds[first], rounds[peer], key) for key in MEASURED
    }
    return tables.bounded(
        ratios | {"cold start": cold}, BOUNDS[method], of=f"{first} / {peer}"
    )


def main(options: Config) -> bool:
    """Runs the benchmark; returns whether all were measured and `BOUNDS` hold."""
    model, folder = options.model.resolve(), options.environments.expanduser()
    if not (model / "config.json").exists():
        raise InputError(
            f"--model: expected a checkpoint folder, got {options.model}; make one by "
            f"`python experiments pretrained.smollm2 --out runs/smollm2`"
        )
    results: dict[str, Any] = {
        "commit": iteration.commit(),
        "versions": line_protocol.versions_of("rlhf-jax", "jax", "jaxlib", "flax"),
        "method": options.method,
        "environment": ENVIRONMENTS[ENVIRONMENT],
    }
    with tempfile.TemporaryDirectory(prefix="rlhf_jax-benchmark-") as name:
        scratch = Path(name)
        prompts = scratch / "prompts.jsonl"
        lines = [json.dumps(row) + "\n" for row in sums()]
        prompts.write_text("".join(lines), encoding="utf-8")
        method = options.method
        task = Task(
            model=str(model),
            prompts=str(prompts),
            learning_rate=LEARNING_RATE[method],
        )
        made = {
            name: ours(method, task, *words, cache=scratch / f"compiled{number}")
            for number, (name, words) in enumerate(OURS[method].items())
        }
        if options.peer:
            name, _ = PEERS[method]
            python = python_of(ENVIRONMENT, folder=folder)
            made[name] = theirs(method, task, python=python)
        results |= {"task": vars(task), "machine": iteration.machine()}
        tables.machine(results["machine"])
        results |= measure(made, options=options, scratch=scratch)
    if options.output is not None:
        text = json.dumps(results, indent=1)
        options.output.write_text(f"{text}\n", encoding="utf-8")
    hold = show(results["participants"], method=options.method, task=task)
    return hold and not results["failed"]


if __name__ == "__main__":
    try:
        sys.exit(not main(tyro.cli(Config, description=__doc__)))
    except (InputError, PeerError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
