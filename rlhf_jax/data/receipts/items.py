"""Statistics of the encoded rows of a source, for the data receipt.

An item is the texts of a row that a loss reads, {title: text}: a demonstration is one
text, a pair its two sides. A `Part` has counts, lengths and an example of the items
with one use, such as training or held out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data import digests, tokenization
from rlhf_jax.data.examples import Example, Labelled, Pair, Text, Tokens
from rlhf_jax.data.tokenization import CONTEXT

Item = Mapping[str, Text]
Decode = Callable[[list[int]], str]
SHOWN = 300  # tokens of an example


def of_texts(examples: Iterable[Text]) -> list[Item]:
    """Makes items of demonstrations, episodes and blocks of plain text."""
    return [{"text": example} for example in examples]


def of_pairs(pairs: Iterable[Pair]) -> list[Item]:
    """Makes items of pairs, each with both responses."""
    return [
        {
            "chosen": Example(pair.prompt, pair.chosen),
            "rejected": Example(pair.prompt, pair.rejected),
        }
        for pair in pairs
    ]


def of_labelled(texts: Iterable[Labelled]) -> list[Item]:
    """Makes items of KTO's responses, without the mismatched ones."""
    return [
        {
            "desirable" if text.desirable else "undesirable": Example(
                text.prompt, text.completion
            )
        }
        for text in texts
    ]


def of_prompts(prompts: Iterable[Tokens]) -> list[Item]:
    """Makes items of prompts, of which no token is learned."""
    return [{"prompt": Example(prompt, ())} for prompt in prompts]


class Part:
    """The rows of a source that have one use, such as training or held out."""

    def __init__(self, items: Sequence[Item]) -> None:
        """Counts the tokens of items."""
        texts = [text for item in items for text in item.values()]
        # One byte per token to save memory: 1 where the token is learned.
        masks = [bytes(text.trained) for text in texts]
        self.rows = len(items)
        self.texts = Counter(title for item in items for title in item)
        self.prompts = [digests.of_prompt(_prompt(item)) for item in items]
        self.turns_learned = sum((b"\0" + mask).count(b"\0\1") for mask in masks)
        self.tokens_learned = sum(mask.count(1) for mask in masks)
        self.tokens = sum(len(mask) for mask in masks)
        self._lengths = {
            "prompt": [len(_prompt(item)) for item in items],
            "response": [len(text.response) for text in texts],
            "text": [len(mask) for mask in masks],
        }
        self._first = items[0] if items else {}

    def to_json(self) -> dict[str, Any]:
        """Returns counts, and the median and longest lengths in tokens."""
        return {
            "rows": self.rows,
            "texts": dict(self.texts),
            "turns_learned": self.turns_learned,
            "tokens_learned": self.tokens_learned,
            "tokens": self.tokens,
            "lengths": {
                name: {"median": float(np.median(lengths)), "longest": max(lengths)}
                for name, lengths in self._lengths.items()
                if lengths
            },
        }

    def example(self, *, decode: Decode) -> list[dict[str, Any]]:
        """Returns the texts of the first row, in pieces that are learned or not."""
        return [
            {"title": title} | shown(text, decode=decode)
            for title, text in self._first.items()
        ]


def shown(text: Text, *, decode: Decode) -> dict[str, Any]:
    """Splits a text into pieces that are learned or not, cut to `SHOWN` tokens.

    The cut keeps the first learned token and the tokens around it, or the end of a text
    of which nothing is learned.

    Args:
      text: the tokens; `text.trained` marks the learned ones.
      decode: token ids -> text, with special tokens.
    """
    tokens = [*text.prompt, *text.response]
    learned = [*map(bool, text.trained)]
    border = learned.index(True) if True in learned else len(tokens)
    start = max(0, min(border - SHOWN // 2, len(tokens) - SHOWN))
    end = min(start + SHOWN, len(tokens))
    changes = [at for at in range(start + 1, end) if learned[at] != learned[at - 1]]
    borders = [start, *changes, end] if tokens else []
    return {
        "tokens": len(tokens),
        "not_shown": {"before": start, "after": len(tokens) - end},
        "pieces": [
            {
                "text": tokenization.added(
                    tokens[one:other],
                    before=tokens[max(0, one - CONTEXT) : one],
                    decode=decode,
                ),
                "learned": learned[one],
            }
            for one, other in itertools.pairwise(borders)
        ],
    }


def shared_prompts(
    training: Iterable[Part], held_out: Part, *, unprompted: Tokens = ()
) -> int:
    """Counts the held-out rows whose prompt is trained on.

    Rows without a prompt, such as blocks of plain text, share none.

    Args:
      unprompted: tokens of a prompt without text, such as BOS.
    """
    none = {None, digests.of_prompt(unprompted)}
    trained = {prompt for part in training for prompt in part.prompts} - none
    return sum(prompt in trained for prompt in held_out.prompts)


def _prompt(item: Item) -> Tokens:
    return next(iter(item.values())).prompt
