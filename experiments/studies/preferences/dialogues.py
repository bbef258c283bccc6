"""Pairs of hh-rlhf as messages, split into three parts by prompt.

"\n\nHuman: Hi\n\nAssistant: Hello"        one text per side of a pair
{"prompt": [{"role": "user", "content": "Hi"}], "chosen": "Hello", "rejected": ...}
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Pair = dict[str, Any]  # "prompt": messages; "chosen", "rejected": texts
TURN = re.compile(r"\n\n(Human|Assistant):")
LAST = "\n\nAssistant:"
ROLES = {"Human": "user", "Assistant": "assistant"}
SHARES = {"proxy": 0.45, "judge": 0.35, "held_out": 0.2}  # of the prompts


def pair(row: Mapping[str, str]) -> Pair | str:
    """A row of hh-rlhf as messages and two responses, or the reason to drop it.

    A turn begins with an empty line and its speaker; "Human:" anywhere else is part of
    a text. White space around a turn is removed.
    """
    prompts, responses = [], []
    for side in ("chosen", "rejected"):
        before, _, response = row[side].rpartition(LAST)
        prompts.append(before)
        responses.append(response.strip())
    if prompts[0] != prompts[1]:
        return "the sides differ before the last response"
    if not all(responses):
        return "a response is blank"
    if responses[0] == responses[1]:
        return "both responses are equal"
    if any(TURN.search(response) for response in responses):
        return "a response goes on with another turn"
    start, *rest = TURN.split(prompts[0])
    speakers, texts = rest[::2], [text.strip() for text in rest[1::2]]
    expected = ["Human", "Assistant"] * len(speakers)
    if start.strip() or not len(speakers) % 2 or speakers != expected[: len(speakers)]:
        return "the speakers do not take turns"
    if not all(texts):
        return "a turn is blank"
    prompt = [
        {"role": ROLES[speaker], "content": text}
        for speaker, text in zip(speakers, texts, strict=True)
    ]
    return {"prompt": prompt, "chosen": responses[0], "rejected": responses[1]}


def pairs(
    rows: Iterable[Mapping[str, str]],
) -> tuple[list[Pair], collections.Counter[str]]:
    """The readable pairs, and the number of dropped rows for each reason."""
    read, left_out = [], collections.Counter[str]()
    for row in rows:
        one = pair(row)
        if isinstance(one, str):
            left_out[one] += 1
        else:
            read.append(one)
    return read, left_out


def opening(one: Pair) -> str:
    """The first message of a dialogue, normalised.

    Dialogues with the same opening go to the same part of the split.
    """
    return " ".join(one["prompt"][0]["content"].casefold().split())


def split(
    kept: Sequence[Pair], *, shares: Mapping[str, float] = SHARES, seed: int = 0
) -> dict[str, list[Pair]]:
    """Splits the pairs into parts that share no opening.

    Args:
      shares: {name of a part: its share of the openings}; the shares add up to 1.
      seed: seed of the assignment of openings to parts.
    """
    openings = sorted({opening(one) for one in kept})
    order = np.random.default_rng(seed).permutation(len(openings))
    bounds = np.rint(np.cumsum([*shares.values()]) * len(openings)).astype(int)
    part_of = np.searchsorted(bounds, order, side="right")
    names = dict(zip(openings, part_of, strict=True))
    return {
        name: [one for one in kept if names[opening(one)] == number]
        for number, name in enumerate(shares)
    }


def prompts(kept: Iterable[Pair]) -> list[dict[str, Any]]:
    """Each prompt once, in the order of the pairs."""
    once = {repr(one["prompt"]): {"prompt": one["prompt"]} for one in kept}
    return [*once.values()]
