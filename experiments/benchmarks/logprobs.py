"""Measures log-probs and entropy from hidden states, with gradients: memory and time.

    python experiments benchmarks.logprobs --out runs/benchmark_logprobs \\
        --torch-python OTHER_ENVIRONMENT/bin/python

`logprobs.token_logprobs_from_hidden` is compared with the computation from all logits
(log_softmax, gather, entropy) in JAX and, if --torch-python names a Python with PyTorch
and NumPy, in PyTorch. A step computes the loss Σ w₁·log-prob + w₂·entropy with random
weights and its gradients in hidden states and head, in float32. Each side is a process,
and they take turns.

Memory is the peak resident memory of all turns above the loaded inputs, results
included. For JAX the compiler's figure of temporaries and results is given too. Seconds
are those of the fastest step of all turns. The results of all sides are compared.

With --rounds 2 the benchmark takes two minutes on 2 CPU cores (AMD EPYC with AVX-512).
It measures 3.3 s and 325 MiB (277 by the compiler); from all logits 4.5 s and 1716 MiB
with JAX 0.10.2, and 4.1 s and 2403 MiB with PyTorch 2.13. That is 0.80 of PyTorch's
time and 0.14 of its memory. The results differ by 5e-7.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import resident
from rlhf_jax import logprobs
from rlhf_jax.functional import checks
from rlhf_jax.runs import command_line, report
from rlhf_jax.runs.folder import open_run, write_summary
from rlhf_jax.runs.run_config import RunConfig

Array = jax.Array
EXPERIMENTS = Path(__file__).resolve().parents[1]
# The program of a process that runs one of `SIDES`.
SIDE = "import sys; from benchmarks import logprobs; logprobs.side(*sys.argv[1:])"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    rows: int = 8
    """Number of sequences."""
    columns: int = 256
    """Tokens of a sequence."""
    width: int = 768
    """Width of hidden states."""
    words: int = 50257
    """Vocabulary, the rows of the head."""
    torch_python: str | None = None
    """Path of a Python with PyTorch; None skips PyTorch."""
    rounds: int = 3
    """Turns of each side."""
    repeats: int = 3
    """Timed steps of a turn, after an untimed one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            rows=self.rows,
            columns=self.columns,
            width=self.width,
            words=self.words,
            rounds=self.rounds,
            repeats=self.repeats,
        )


def chunked(hidden: Array, head: Array, tokens: Array) -> tuple[Array, Array]:
    return logprobs.token_logprobs_from_hidden(hidden, head, tokens)


def plain(hidden: Array, head: Array, tokens: Array) -> tuple[Array, Array]:
    logits = jnp.einsum("bsd,vd->bsv", hidden[:, :-1], head)
    every = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(every) * every, axis=-1)
    shift = ((0, 0), (1, 0))
    return jnp.pad(picked, shift), jnp.pad(entropy, shift)


SIDES = {"rlhf_jax": chunked, "JAX, all logits": plain}


def side(name: str, shape: str, repeats: str) -> None:
    """Runs one turn of one of `SIDES` and prints the figures as JSON."""
    compute = SIDES[name]
    inputs = resident.inputs(**json.loads(shape))
    names = ("hidden", "head", "tokens", "weights")
    arrays = [jnp.array(inputs.pop(name), copy=True) for name in names]

    def loss(hidden: Array, head: Array, tokens: Array, weights: Array) -> Array:
        picked, entropy = compute(hidden, head, tokens)
        return jnp.sum(weights[0] * picked + weights[1] * entropy)

    step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()

    def run() -> list[Array]:
        value, gradients = jax.block_until_ready(step(*arrays))
        return [value, *gradients]

    measured = resident.measure(run, repeats=int(repeats))
    memory = step.memory_analysis()
    compiler = None
    if memory is not None:
        size = memory.temp_size_in_bytes + memory.output_size_in_bytes
        compiler = size / 2**20
    print(json.dumps({**measured, "compiler": compiler, "version": jax.__version__}))


def turn(command: list[str], shape: dict[str, int], repeats: int) -> dict[str, Any]:
    """Runs the process of one side and returns its last line."""
    ended = subprocess.run(
        [*command, json.dumps(shape), str(repeats)],
        cwd=EXPERIMENTS,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def main(options: Config) -> None:
    folder = open_run(options)
    shape = {
        "rows": options.rows,
        "columns": options.columns,
        "width": options.width,
        "words": options.words,
    }
    commands = {name: [sys.executable, "-c", SIDE, name] for name in SIDES}
    if options.torch_python is not None:
        program = ("-m", "benchmarks.logprobs_torch")
        commands["PyTorch"] = [options.torch_python, *program]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            turns[name].append(turn(command, shape, options.repeats))
    ours = turns["rlhf_jax"][0]["numbers"]
    rows = []
    for name, taken in turns.items():
        apart = max(
            abs(own - other) / abs(own)
            for own, other in zip(ours, taken[0]["numbers"], strict=True)
        )
        rows.append(
            {
                "side": name,
                "version": taken[0]["version"],
                "seconds": min(one["seconds"] for one in taken),
                "slowest": max(one["seconds"] for one in taken),
                "resident_mib": max(one["mib"] for one in taken),
                "compiler_mib": taken[0].get("compiler"),
                "apart": apart,
            }
        )
    columns = ("side", "version", "seconds", "slowest", "resident MiB")
    report.table(
        "Log-probs, entropy and their gradient",
        (*columns, "compiler MiB", "apart"),
        [tuple(row.values()) for row in rows],
    )
    last = rows[-1]
    report.table(
        f"rlhf_jax / {last['side']}",
        ("seconds", "resident MiB"),
        [[rows[0][key] / last[key] for key in ("seconds", "resident_mib")]],
    )
    write_summary(folder, {"shape": shape, "sides": rows})


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
