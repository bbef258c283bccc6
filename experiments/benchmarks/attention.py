"""Compares attention engines on one layer, with gradients.

    python experiments benchmarks.attention --out runs/attention
    python experiments benchmarks.attention --out runs/packed --columns 4096 --texts 8

The engines take turns in one process on the same arrays, and their results are compared
with those of the first. Seconds are medians over the rounds; temporary memory is the
compiler's figure. --texts packs that many texts of equal length into each row.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.functional import checks
from rlhf_jax.models.attention import attend_xla
from rlhf_jax.models.attention.blockwise import attend_blockwise
from rlhf_jax.models.positions import AttentionMask
from rlhf_jax.runs import command_line, report
from rlhf_jax.runs.folder import open_run, write_summary
from rlhf_jax.runs.run_config import RunConfig

Array = jax.Array
ENGINES: dict[str, Callable[..., Array]] = {
    "xla": attend_xla,
    "blockwise": attend_blockwise,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    columns: tuple[int, ...] = (1024, 2048, 4096)
    """Lengths of a row, tokens."""
    rows: int = 1
    """Rows of the batch."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 4
    """Heads of keys and values."""
    head_dim: int = 64
    """Dimension of a head."""
    texts: int = 1
    """Texts packed into a row."""
    rounds: int = 5
    """Measured steps of each engine, after a warm-up step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            rows=self.rows, heads=self.heads, texts=self.texts, rounds=self.rounds
        )


def inputs(options: Config, *, columns: int) -> tuple[Array, ...]:
    """Returns query, key, value, the weights of the output, and segments."""
    rng = np.random.default_rng(0)

    def normal(heads: int) -> Array:
        shape = options.rows, heads, columns, options.head_dim
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    text = 1 + np.arange(columns) * options.texts // columns
    segments = np.tile(text.astype(np.int32), (options.rows, 1))
    heads, kv_heads = options.heads, options.kv_heads
    arrays = map(normal, (heads, kv_heads, kv_heads, heads))
    return *arrays, jnp.asarray(segments)


def step_of(engine: Callable[..., Array]) -> Any:
    """A program for the weighted sum of the output and its gradients."""

    def loss(
        query: Array, key: Array, value: Array, weights: Array, segments: Array
    ) -> Array:
        mask = AttentionMask(segments=segments)
        return jnp.sum(engine(query, (key, value), mask=mask) * weights)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def measure(options: Config, *, columns: int) -> list[dict[str, Any]]:
    """Measures every engine and returns a row of the table for each."""
    arrays = inputs(options, columns=columns)
    steps = {name: step_of(one).lower(*arrays) for name, one in ENGINES.items()}
    programs = {name: lowered.compile() for name, lowered in steps.items()}
    results = {
        name: jax.block_until_ready(run(*arrays)) for name, run in programs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.rounds):
        for name, run in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            seconds[name].append(time.perf_counter() - began)
    first = next(iter(ENGINES))
    largest = functools.partial(jax.tree.map, lambda a, b: float(jnp.abs(a - b).max()))
    base = programs[first].memory_analysis().temp_size_in_bytes
    rows = []
    for name, program in programs.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds[first], strict=True)]
        memory = program.memory_analysis().temp_size_in_bytes
        apart = jax.tree.leaves(largest(results[name][1], results[first][1]))
        rows.append(
            {
                "columns": columns,
                "engine": name,
                "seconds": statistics.median(seconds[name]),
                "ratio": statistics.median(ratios),
                "temporary_mib": memory / 2**20,
                "memory_ratio": memory / base,
                "apart": max(apart),
            }
        )
    return rows


def main(options: Config) -> None:
    """Runs every length and prints one table."""
    folder = open_run(options)
    rows = [row for n in options.columns for row in measure(options, columns=n)]
    heads = ("columns", "engine", "seconds", f"/ {next(iter(ENGINES))}")
    report.table(
        "Attention and its gradients",
        (*heads, "temporary MiB", "of it", "apart"),
        [tuple(row.values()) for row in rows],
    )
    write_summary(folder, {"rows": rows})


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
