"""Sums of three digits and their verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax import rewards, verifiers
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.data import batches

Row = dict[str, Any]
LETTERS = "·0123456789+<>."  # the first is padding, the last ends a response
PAD_ID, STOP_ID = 0, len(LETTERS) - 1
NEW_TOKENS = 3  # two digits and the stop
PROMPT_TOKENS = len("<1+2+3>")


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode_text(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def every_triple(seed: int) -> list[Row]:
    """Rows {"prompt": "<3+4+5>", "answer": "12"} of all triples of digits, shuffled."""
    digits = np.random.default_rng(seed).permutation(1000)
    triples = [(number // 100, number // 10 % 10, number % 10) for number in digits]
    return [
        {"prompt": f"<{a}+{b}+{c}>", "answer": str(a + b + c)} for a, b, c in triples
    ]


def verifier(rows: Sequence[Row]) -> rewards.TextReward:
    """A reward of 1 if the last integer of the response is the sum, else 0."""
    return rewards.TextReward(
        verifiers.each(verifiers.LastInteger("answer")), decode_text, rows
    )


def prompts_of(
    rows: Sequence[Row], *, batch_size: int, seed: int, samples_per_prompt: int = 1
) -> batches.Batches[Prompts]:
    return batches.prompt_batches(
        [encode(row["prompt"]) for row in rows],
        batch_size=batch_size,
        samples_per_prompt=samples_per_prompt,
        seed=seed,
        pad_id=PAD_ID,
    )
