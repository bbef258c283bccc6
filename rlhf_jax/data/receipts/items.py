"""What the rows of a source have become, as the texts that a loss reads of each.

An item is {title: text}: a demonstration is one text, a pair is its two sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlhf_jax.data.examples import Example, Labelled, Pair, Text, Tokens

Item = Mapping[str, Text]


def of_texts(examples: Iterable[Text]) -> list[Item]:
    """Demonstrations, episodes and blocks of plain text."""
    return [{"text": example} for example in examples]


def of_pairs(pairs: Iterable[Pair]) -> list[Item]:
    """Both responses of each pair, of which a loss compares the tokens."""
    return [
        {
            "chosen": Example(pair.prompt, pair.chosen),
            "rejected": Example(pair.prompt, pair.rejected),
        }
        for pair in pairs
    ]


def of_labelled(texts: Iterable[Labelled]) -> list[Item]:
    """KTO's responses; the mismatched ones are not learned."""
    return [
        {
            "desirable" if text.desirable else "undesirable": Example(
                text.prompt, text.completion
            )
        }
        for text in texts
    ]


def of_prompts(prompts: Iterable[Tokens]) -> list[Item]:
    """Prompts, whose responses are sampled: no token of the rows is learned."""
    return [{"prompt": Example(prompt, ())} for prompt in prompts]
