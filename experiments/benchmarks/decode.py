"""Sampling: continuous batching of a queue, and the cost of rows and long responses.

    python experiments benchmarks.decode --out runs/benchmark_decode

Three questions, put to a GPT-2 of random weights, in float32:

1. Uneven lengths. So many tokens of the vocabulary stop a response that lengths are
   geometric, with a mean of a quarter of the most. A queue of prompts is answered in
   plain batches, each until its longest response ends, and by continuous
   batching (`decode.generate`), where the next prompts take the places of finished
   rows. Both draw the same responses, but for a few in a thousand where rounding
   decides which of two tokens is drawn (checked), and take turns in one process.
   --cache-pages adds continuous batching whose rows share so many pages of keys and
   values, and the temporary memory of each program by the compiler.
2. Seconds of a decode step against the rows of a batch, which should grow at most as
   they do.
3. Seconds of a response against its length, which should grow at most 1.15 times as
   it does.

Seconds are medians of --repeats after one that is not counted, the prompts' pass
included; 2 and 3 have no stop tokens.

On 2 CPU cores (AMD EPYC with AVX-512), JAX 0.10.2, --repeats 2, huge pages: 6069 tokens
a second by continuous batching against 2221 in plain batches, 2.7 times as many. A step
takes 1.1 ms with 8 rows and 6.9 with 64, 0.77 of the growth of the rows. 8 rows of 512
tokens took 8 x 1.7 the time of 64 tokens, and 64 rows 8 x 2.0: more than the 1.15 that
is asked. What grows is attention over the cache, 0.5 MiB a column in float32 with 64
rows, which it reads as fast as that machine's memory (18 GB/s). Of the shape of GPT-2
small (--num-layers 12 --hidden-size 768 --num-heads 12 --vocab-size 50257), whose
weights are most of what a token reads, 8 rows took 8 x 1.11 to 8 x 1.14.
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
    """Of the model."""
    hidden_size: int = 256
    """Of the model."""
    num_heads: int = 4
    """Of the model."""
    vocab_size: int = 512
    """Of the model."""
    prompt_size: int = 16
    """Tokens of a prompt."""
    continuous_batching: int = 64
    """Rows decoded at a time in 1."""
    batches: int = 8
    """Prompts in the queue of 1, in multiples of those rows; 0 leaves 1 out."""
    cache_pages: tuple[int, ...] = ()
    """Pools of pages that rows share in 1, one after another."""
    page_size: int = PAGE_SIZE
    """Columns of a page."""
    response_size: int = 64
    """Most tokens of a response in 1, all of it in 2."""
    rows: tuple[int, ...] = (8, 16, 32, 64)
    """Of the batches in 2."""
    response_sizes: tuple[int, ...] = (64, 128, 256, 512)
    """Tokens of the responses in 3."""
    length_rows: tuple[int, ...] = (8, 64)
    """Of the batches in 3."""
    repeats: int = 3
    """Timed turns of each side."""

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
    """Of random tokens, with the keys of their responses."""
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
    """Median seconds of each side, the sides one after another in every turn."""
    seconds: dict[Any, list[float]] = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def uneven(params: Any, options: Config) -> dict[str, Any]:
    """Continuous batching against plain batches."""
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
    """That responses are the same, but for draws that rounding moves to the next token.

    Args:
      actual, expected: i32[N, S], tokens.

    Raises:
      RuntimeError: responses part at tokens that are no neighbours, or more of them
        part than one and 1 % of N (of 512 one at most was found to).
    """
    apart = actual != expected
    rows = np.flatnonzero(apart.any(axis=1))
    at = rows, apart[rows].argmax(axis=1)  # where each parts; what follows is another
    strides = np.abs(actual[at] - expected[at])
    if len(rows) > 1 + len(actual) // 100 or (strides != 1).any():
        raise RuntimeError(
            f"expected both ways to draw the same responses, but for a few "
            f"that part at neighbouring tokens, got {len(rows)} of {len(actual)} that "
            f"part, by {strides.tolist()} tokens; continuous batching is at fault: "
            f"please report it"
        )


def of_length(params: Any, options: Config, *, rows: int, size: int) -> Run:
    """Responses of `size` tokens each."""
    batch = prompts(rows, options)
    static = {"model": options.model, "max_new_tokens": size, "stop_ids": ()}
    compiled = program(params, batch, **static)
    return lambda: compiled(params, **batch)


def more_rows(params: Any, options: Config) -> list[dict[str, float]]:
    """Seconds of a step, and how they grow beside the rows."""
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
    """Seconds of a response, and how they grow beside its length."""
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
            f"Response tokens a second, of {uneven_rate['mean_length']:.1f} a response",
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
