"""A tiny language of product reviews, in files that the trainers read.

    prompt      A review of the blue kettle:
    response     The lid is sturdy. The price is awful.

Simulated people prefer praise. Of two reviews they choose one by the Bradley-Terry
model, P(a over b) = 1 / (1 + exp(worth(b) - worth(a))).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PRODUCTS = ("kettle", "lamp", "chair", "radio", "coat", "bag", "clock", "mirror")
LOOKS = ("blue", "red", "old", "new", "big", "small", "round", "plain")
PARTS = ("lid", "handle", "colour", "price", "size", "box")
WORTH = {"lovely": 2, "sturdy": 1, "fine": 0, "dull": -1, "awful": -2}
PROMPTS = tuple(
    f"A review of the {look} {product}:"
    for look, product in itertools.product(LOOKS, PRODUCTS)
)
NUM_HELD_OUT = 16  # prompts on which no model is trained
NUM_DEMONSTRATIONS = 2000
NUM_PAIRS = 1500
STOP, PAD = "<|endoftext|>", "<|pad|>"


def review(rng: random.Random) -> str:
    """Returns one to three sentences, each about a different part."""
    parts = rng.sample(PARTS, rng.randint(1, 3))
    return "".join(f" The {part} is {rng.choice([*WORTH])}." for part in parts)


def worth(response: str) -> int:
    """Returns the sum of the worth of all words, repetitions included."""
    return sum(WORTH.get(word, 0) for word in re.findall(r"\w+", response))


def pair(rng: random.Random, prompt: str) -> dict[str, str]:
    """Returns a prompt with a chosen and a rejected review."""
    one, other = review(rng), review(rng)
    probability = 1 / (1 + math.exp(worth(other) - worth(one)))
    chosen, rejected = (one, other) if rng.random() < probability else (other, one)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(folder: Path, *, seed: int = 0) -> list[Path]:
    """Writes demonstrations, pairs, prompts and a tokenizer, and returns their paths.

    Raises:
      OSError: a file cannot be written.
    """
    rng = random.Random(seed)
    prompts = rng.sample(PROMPTS, len(PROMPTS))
    held_out, prompts = prompts[:NUM_HELD_OUT], prompts[NUM_HELD_OUT:]
    demonstrations = [
        {"prompt": rng.choice(prompts), "response": review(rng)}
        for _ in range(NUM_DEMONSTRATIONS)
    ]
    pairs = (pair(rng, rng.choice(prompts)) for _ in range(NUM_PAIRS))
    return [
        _write_rows(folder / "demonstrations.jsonl", demonstrations),
        _write_rows(folder / "pairs.jsonl", (p for p in pairs if differ(p))),
        _write_rows(folder / "prompts.jsonl", ({"prompt": p} for p in prompts)),
        _write_rows(folder / "held_out.jsonl", ({"prompt": p} for p in held_out)),
        _write_tokenizer(
            folder / "tokenizer",
            [row["prompt"] + row["response"] for row in demonstrations],
        ),
    ]


def differ(pair: dict[str, str]) -> bool:
    """Whether the two reviews differ."""
    return pair["chosen"] != pair["rejected"]


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def _write_tokenizer(folder: Path, texts: list[str]) -> Path:
    """Trains a byte-level BPE tokenizer, as GPT-2's, and writes it for Hugging Face."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[STOP, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": PAD,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
