"""Encoded texts that losses read: demonstrations, episodes and pairs.

prompt       The cat               response    sat. <eos>
trained       0   0                             1    1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Tokens = Sequence[int]


class Example(NamedTuple):
    """A text for the language-model loss, which reads the response."""

    prompt: Tokens
    response: Tokens  # with EOS

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    @property
    def trained(self) -> list[bool]:
        """Whether the loss reads each token: the response, but never token 0."""
        start = max(len(self.prompt), 1)
        return [place >= start for place in range(self.length)]


class Episode(NamedTuple):
    """A demonstration of several turns, of which the loss reads the responses."""

    prompt: Tokens
    response: Tokens  # responses, each with EOS, and the observations between them
    observed: tuple[tuple[int, int], ...]  # [start, end) in `response`, not trained on

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    @property
    def trained(self) -> list[bool]:
        """Whether the loss reads each token: as in `Example`, but no observation."""
        trained, before = Example(self.prompt, self.response).trained, len(self.prompt)
        for start, end in self.observed:
            trained[before + start : before + end] = [False] * (end - start)
        return trained


class Pair(NamedTuple):
    """Two responses to one prompt."""

    prompt: Tokens
    chosen: Tokens  # with EOS
    rejected: Tokens  # with EOS
    margin: float | None = None  # the margin of the scores, in reward units

    @property
    def length(self) -> int:
        """Tokens of the prompt and the longer response."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


class Labelled(NamedTuple):
    """KTO's response with its label, and a response to another prompt."""

    prompt: Tokens
    completion: Tokens  # with EOS
    mismatched: Tokens  # cut where it would not fit
    desirable: bool

    @property
    def pair(self) -> Pair:
        """The two responses as a packed pair, the labelled one first."""
        return Pair(self.prompt, self.completion, self.mismatched)


Text = Example | Episode
