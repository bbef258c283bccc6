"""Prepares rows, demonstrations, a tokenizer and SFT models for the sweeps of `turns`.

    python experiments studies.turns.preparation --out runs/turns
    rlhf-jax sweep experiments/studies/turns/calculator.toml --out runs/turns/calculator
    rlhf-jax sweep experiments/studies/turns/guessing.toml --out runs/turns/guessing
    python experiments studies.turns.figures runs/turns/calculator
    python experiments studies.turns.figures runs/turns/guessing

For each seed a fresh model of two layers learns by `rlhf-jax sft` from few
demonstrations of an environment's expert. SFT stops early, when about a third of the
sampled episodes succeed. The sweeps continue by `rlhf-jax grpo --environment`, with
this model as the reference. Expect two minutes.
"""

from __future__ import annotations

import dataclasses
import json
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import transformers
import tyro

from rlhf_jax.environments import calculator, guessing
from rlhf_jax.environments.demonstrations import demonstrations
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.config.optimizer import AdamW, Cosine, Optimizer
from rlhf_jax.train.config.supervised import Rows
from rlhf_jax.train.supervised import sft

LETTERS = "0123456789+-*()=:. \n" + string.ascii_letters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    """Folder of the rows and models of both environments."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; each has its own model for each environment."""
    calculator_steps: int = 270
    """Updates of SFT on the calculator's demonstrations."""
    guessing_steps: int = 55
    """Updates of SFT on the demonstrations of guessing."""


def characters() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are characters."""
    names = ["<eos>", "<pad>", *LETTERS]
    model = tokenizers.models.WordLevel(
        {name: number for number, name in enumerate(names)}, unk_token="<pad>"
    )
    backend = tokenizers.Tokenizer(model)
    every = tokenizers.Regex(r"[\s\S]")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(every, "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    )


def write(path: Path, rows: Sequence[Any]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(options: Options) -> None:
    """Writes OUT/data/NAME and OUT/sft/NAME/seed_N."""
    tokenizer = options.out / "tokenizer"
    characters().save_pretrained(tokenizer)
    sums = calculator.rows(1200, seed=0)
    numbers = guessing.rows(700, seed=0)
    of = {
        "calculator": (
            *(sums[:1000], sums[1000:], calculator.Calculator()),
            *(calculator.expert, 400, options.calculator_steps),
        ),
        "guessing": (
            *(numbers[:500], numbers[500:], guessing.Guessing()),
            *(guessing.Bisection(), 200, options.guessing_steps),
        ),
    }
    for name, (rows, held_out, environment, expert, shown, steps) in of.items():
        folder = options.out / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "train.jsonl", rows)
        write(folder / "held_out.jsonl", held_out)
        shows = demonstrations(environment, rows[:shown], expert=expert)
        write(folder / "demonstrations.jsonl", shows)
        for seed in options.seeds:
            sft.main(
                sft.Config(
                    start=sft.Start(
                        tokenizer=str(tokenizer),
                        fresh_hidden_size=64,
                        fresh_num_layers=2,
                        fresh_num_heads=4,
                        fresh_max_positions=160,
                    ),
                    data=sft.Demonstrations(data=str(folder / "demonstrations.jsonl")),
                    optimizer=Optimizer(
                        learning_rate=3e-3,
                        optimizer=AdamW(),
                        schedule=Cosine(warmup=0.05),
                    ),
                    batch=Rows(batch_size=32),
                    num_steps=steps,
                    watch=sft.Watch(held_out_by="row"),  # guessing has one prompt
                    seed=seed,
                    out=options.out / "sft" / name / f"seed_{seed}",
                )
            )


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except InputError as error:
        sys.exit(f"error: {error}")
