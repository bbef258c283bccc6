"""Prepares data, SFT models and reward models of the language for `sweep.toml`.

    python experiments studies.ppo_or_grpo.preparation --out runs/ppo_or_grpo

For each seed a model of two layers learns the quickstart's language by `rlhf-jax sft`,
and a reward model learns by `rlhf-jax reward-model` from pairs of reviews that a noisy
judge labels. Expect two to four minutes on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
import tyro
from worlds import reviews

from rlhf_jax.train.supervised import reward_model, sft

NUM_REVIEWS = 20_000  # demonstrations
NUM_PAIRS = 4096
NUM_HELD_OUT = 256
LABEL_NOISE = 0.4  # gold units, as in the quickstart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    """Folder of the data and models."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds; each has its own models."""
    sft_steps: int = 300
    """Updates of SFT."""
    reward_steps: int = 120
    """Updates of the reward model."""


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words of the language."""
    numbers = {word: number for number, word in enumerate(reviews.VOCABULARY)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(numbers, unk_token=reviews.PAD)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=reviews.EOS, pad_token=reviews.PAD
    )


def text(words: Iterable[str]) -> str:
    """Joins the words without <eos>, which the trainers add."""
    return " ".join(word for word in words if word != reviews.EOS)


def pairs(seed: int) -> list[dict[str, str]]:
    """Pairs of reviews, P(a is chosen) = σ((gold a - gold b) / noise)."""
    rows: list[dict[str, str]] = []
    rng = np.random.default_rng(seed)
    for number in range(NUM_PAIRS):
        prompt = reviews.TRAIN_PROMPTS[rng.integers(len(reviews.TRAIN_PROMPTS))]
        (_, a), (_, b) = reviews.sample_reviews(
            seed * NUM_PAIRS + number, 2, prompts=[prompt]
        )
        gold = [np.array([reviews.gold(one)]) for one in (a, b)]
        [a_is_better] = reviews.noisy_preferences(rng, *gold, noise=LABEL_NOISE)
        better, worse = (a, b) if a_is_better else (b, a)
        if better != worse:
            rows.append(
                {
                    "prompt": text(prompt),
                    "chosen": f" {text(better)}",
                    "rejected": f" {text(worse)}",
                }
            )
    return rows


def write(path: Path, rows: Iterable[Any]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(options: Options) -> None:
    """Writes OUT/data, OUT/sft/seed_N and OUT/reward/seed_N."""
    data = options.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(options.out / "tokenizer")
    for name, prompts in {
        "train": reviews.TRAIN_PROMPTS,
        "held_out": reviews.HELD_OUT_PROMPTS[:NUM_HELD_OUT],
    }.items():
        write(data / f"{name}.jsonl", ({"prompt": text(words)} for words in prompts))
    for seed in options.seeds:
        shown = reviews.sample_reviews(seed, NUM_REVIEWS)
        write(
            data / f"demonstrations_{seed}.jsonl",
            ({"prompt": text(p), "response": f" {text(r)}"} for p, r in shown),
        )
        write(data / f"pairs_{seed}.jsonl", pairs(seed))
        own, sft_folder = f"seed_{seed}", options.out / "sft"
        every = [f"--seed={seed}", "--no-progress"]
        sft.command(
            [
                f"--tokenizer={options.out / 'tokenizer'}",
                f"--data={data / f'demonstrations_{seed}.jsonl'}",
                *("--fresh-hidden-size=64", "--fresh-num-layers=2"),
                *("--fresh-num-heads=4", "--fresh-max-positions=48"),
                *("--learning-rate=3e-3", "--batch-size=64"),
                f"--num-steps={options.sft_steps}",
                f"--out={sft_folder / own}",
                *every,
            ]
        )
        reward_model.command(
            [
                f"--model={sft_folder / own / 'model'}",
                f"--data={data / f'pairs_{seed}.jsonl'}",
                *("--learning-rate=1e-3", "--batch-size=64"),
                "--normalise=samples,max_new_tokens=28",
                f"--num-steps={options.reward_steps}",
                f"--out={options.out / 'reward' / own}",
                *every,
            ]
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
