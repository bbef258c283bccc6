"""Sampling: continuous batching of a queue, and the cost of rows and long responses.

    python experiments benchmarks.decode --out runs/benchmark_decode

The benchmark answers three questions with a GPT-2 of random weights in float32:

1. How much faster is continuous batching for uneven lengths? Many tokens of the
   vocabulary stop a response, so that lengths are geometric with a mean of a quarter of
   the longest. A queue of prompts is decoded in plain batches, each until its longest
   response ends, and by continuous batching (`decode.generate`), where new prompts
   replace finished rows. Both take turns in one process. It is checked that they draw
   the same responses, except for a few in a thousand where rounding decides between two
   tokens. --cache-pages adds continuous batching with a shared pool of pages of keys
   and values; the compiler reports the temporary memory of each program.
2. How does the time of a decode step grow with the rows of a batch? It should grow at
   most proportionally.
3. How does the time of a response grow with its length? It should grow at most 1.15
   times as fast as the length.

Seconds are medians over --repeats after one uncounted run, and include the forward pass
of the prompts. 2 and 3 have no stop tokens.

On 2 CPU cores (AMD EPYC with AVX-512), JAX 0.10.2, --repeats 2, huge pages: 6069 tokens
per second by continuous batching and 2221 in plain batches, a factor of 2.7. A step
takes 1.1 ms with 8 rows and 6.9 ms with 64, 0.77 of proportional growth. From 64 to 512
tokens the time grew by 8 x 1.7 with 8 rows and 8 x 2.0 with 64 rows, above the bound of
1.15. The cause is attention over the cache, 0.5 MiB per column in float32 with 64 rows,
which is read at the bandwidth of the memory (18 GB/s). With the shape of GPT-2 small
(--num-layers 12 --hidden-size 768 --num-heads 12 --vocab-size 50257), where weights
dominate the reads, 8 rows took 8 x 1.11 to 8 x 1.14.
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

from rlhf_jax import config, decode, decoder
from rlhf_jax.functional import checks
from rlhf_jax.models import layout
from rlhf_jax.models.config import PAGE_SIZE, ModelConfig
from rlhf_jax.models.generation.decode import Generated
from rlhf_jax.runs import command_line, report
from rlhf_jax.runs.folder import open_run, write_summary
from rlhf_jax.runs.run_config import RunConfig

Array = jax.Array
Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_layers: int = 4
    """Layers of the model."""
    hidden_size: int = 256
    """Width of the model."""
    num_heads: int = 4
    """Attention heads of the model."""
    vocab_size: int = 512
    """Vocabulary of the model, tokens."""
    prompt_size: int = 16
    """Tokens of a prompt."""
    continuous_batching: int = 64
    """Rows that are decoded at a time in question 1."""
    batches: int = 8
    """Length of the queue in question 1, in multiples of those rows; 0 skips it."""
    cache_pages: tuple[int, ...] = ()
    """Sizes of shared pools to measure in question 1, pages."""
    page_size: int = PAGE_SIZE
    """Columns of a page."""
    response_size: int = 64
    """Longest response in question 1, and every response in question 2, tokens."""
    rows: tuple[int, ...] = (8, 16, 32, 64)
    """Batch sizes in question 2."""
    response_sizes: tuple[int, ...] = (64, 128, 256, 512)
    """Response lengths in question 3, tokens."""
    length_rows: tuple[int, ...] = (8, 64)
    """Batch sizes in question 3."""
    repeats: int = 3
    """Timed runs of each program."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.non_negative(batches=self.batches)
        checks.positive(
            prompt_size=self.prompt_size,
            continuous_batching=self.continuous_batching,
            response_size=self.response_size,
            page_size=self.page_size,
            repeats=self.repeats,
        )

    @property
    def model(self) -> ModelConfig:
        longest = max(self.response_size, *self.response_sizes)
        model = config.gpt2(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            max_positions=self.prompt_size + longest,
        )
        return layout.fastest(model)


def prompts(rows: int, options: Config) -> dict[str, Array]:
    """Random prompts, with the keys of their responses."""
    rng = np.random.default_rng(options.seed)
    shape = (rows, options.prompt_size)
    index = jnp.arange(rows, dtype=jnp.int32)
    return {
        "tokens": jnp.asarray(rng.integers(0, options.vocab_size, shape), jnp.int32),
        "mask": jnp.ones(shape, bool),
        "keys": decode.row_keys(
            jax.random.key(options.seed), index=index, sample=jnp.zeros_like(index)
        ),
    }


def program(params: Any, batch: dict[str, Array], **static: Any) -> Any:
    """`decode.generate`, compiled."""
    generate = jax.jit(functools.partial(decode.generate, **static))
    return generate.lower(params, **batch).compile()


def in_turns(sides: dict[Any, Run], *, repeats: int) -> dict[Any, float]:
    """Median seconds of each side; the sides take turns."""
    seconds: dict[Any, list[float]] = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def uneven(params: Any, options: Config) -> dict[str, Any]:
    """Compares continuous batching with plain batches."""
    size = options.continuous_batching
    queue = prompts(size * options.batches, options)
    parts = [
        jax.tree.map(lambda leaf: leaf[n * size : (n + 1) * size], queue)  # noqa: B023
        for n in range(options.batches)
    ]
    share = max(1, 4 * options.vocab_size // options.response_size)
    static = {
        "model": options.model,
        "max_new_tokens": options.response_size,
        "stop_ids": tuple(range(share)),
    }
    plain = program(params, parts[0], **static)
    pools: dict[str, ModelConfig] = {
        f"{pages} pages": dataclasses.replace(
            options.model, cache_pages=pages, page_size=options.page_size
        )
        for pages in options.cache_pages
    }
    programs = {
        name: program(
            params, queue, continuous_batching=size, **static | {"model": model}
        )
        for name, model in ({"continuous": options.model} | pools).items()
    }

    def in_batches() -> list[Generated]:
        return [plain(params, **part) for part in parts]

    expected = jax.tree.map(lambda *leaves: np.concatenate(leaves), *in_batches())
    for compiled in programs.values():
        responses = compiled(params, **queue)
        check_same(np.asarray(responses.tokens), np.asarray(expected.tokens))
    tokens = int(expected.response_mask.sum())
    runs: dict[str, Run] = {
        name: functools.partial(compiled, params, **queue)
        for name, compiled in programs.items()
    }
    seconds = in_turns({"batches": in_batches, **runs}, repeats=options.repeats)
    return {
        "mean_length": tokens / len(expected.tokens),
        "tokens_per_second": {name: tokens / took for name, took in seconds.items()},
        "ratio": seconds["batches"] / seconds["continuous"],
        "temporary_mib": {
            name: one.memory_analysis().temp_size_in_bytes / 2**20
            for name, one in ({"batches": plain} | programs).items()
        },
    }


def check_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Checks that responses are equal, except where rounding draws the next token.

    Args:
      actual, expected: i32[N, S], tokens.

    Raises:
      RuntimeError: responses first differ at tokens that are not neighbours, or more
        than 1 + N/100 of them differ (of 512 at most one did).
    """
    apart = actual != expected
    rows = np.flatnonzero(apart.any(axis=1))
    at = rows, apart[rows].argmax(axis=1)  # the first difference; later ones follow it
    strides = np.abs(actual[at] - expected[at])
    if len(rows) > 1 + len(actual) // 100 or (strides != 1).any():
        raise RuntimeError(
            f"expected both ways to draw the same responses, but for a few "
            f"that part at neighbouring tokens, got {len(rows)} of {len(actual)} that "
            f"part, by {strides.tolist()} tokens; continuous batching is at fault: "
            f"please report it"
        )


def of_length(params: Any, options: Config, *, rows: int, size: int) -> Run:
    """A program that samples responses of `size` tokens each."""
    batch = prompts(rows, options)
    static = {"model": options.model, "max_new_tokens": size, "stop_ids": ()}
    compiled = program(params, batch, **static)
    return lambda: compiled(params, **batch)


def more_rows(params: Any, options: Config) -> list[dict[str, float]]:
    """Milliseconds of a step, and their growth relative to the rows."""
    size = options.response_size
    seconds = in_turns(
        {n: of_length(params, options, rows=n, size=size) for n in options.rows},
        repeats=options.repeats,
    )
    first = options.rows[0]
    return [
        {
            "rows": rows,
            "step_ms": 1e3 * took / size,
            "growth": took * first / (seconds[first] * rows),
        }
        for rows, took in seconds.items()
    ]


def longer(params: Any, options: Config) -> list[dict[str, float]]:
    """Seconds of a response, and their growth relative to its length."""
    rates = []
    for rows in options.length_rows:
        seconds = in_turns(
            {
                size: of_length(params, options, rows=rows, size=size)
                for size in options.response_sizes
            },
            repeats=options.repeats,
        )
        first = options.response_sizes[0]
        rates += [
            {
                "rows": rows,
                "tokens": size,
                "seconds": took,
                "growth": took * first / (seconds[first] * size),
            }
            for size, took in seconds.items()
        ]
    return rates


def show(title: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        report.table(title, tuple(rows[0]), [tuple(row.values()) for row in rows])


def main(options: Config) -> None:
    folder = open_run(options)
    params = jax.jit(decoder.init, static_argnames="model")(
        jax.random.key(options.seed), model=options.model
    )
    summary: dict[str, Any] = {}
    if options.batches:
        summary["uneven"] = uneven_rate = uneven(params, options)
        speed = uneven_rate["tokens_per_second"]
        show(
            f"Tokens per second, of {uneven_rate['mean_length']:.1f} per response",
            [{**speed, "continuous / batches": uneven_rate["ratio"]}],
        )
        show("Temporary memory, MiB", [uneven_rate["temporary_mib"]])
    summary["rows"] = more_rows(params, options)
    show("A step of decoding; growth is beside the rows'", summary["rows"])
    summary["lengths"] = longer(params, options)
    show("Responses; growth is beside their length's", summary["lengths"])
    write_summary(folder, summary)


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
