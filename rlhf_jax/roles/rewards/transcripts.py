"""Rows of a rollout as text: the prompt, and the tokens that follow it in order.

    prompt      Guess a number from 1 to 8.
    response    4⟦higher⟧6⟦right⟧

With one turn the response is the text of its sampled tokens. With several turns,
observations between and after them are in brackets, to set them apart from the policy's
own text. A policy can write such brackets itself: they mark observations for a reader,
and only the tokens' masks prove them to a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

HostArray = np.ndarray[Any, Any]
Array = jax.Array
Decode = Callable[[list[int]], str]
Prompt = str | list[dict[str, Any]]  # plain text, or the messages of a conversation
OPEN, CLOSE = "⟦", "⟧"  # around observations


class Responses(Protocol):
    """The part of `batch.Rollout` that rewards read."""

    @property
    def tokens(self) -> Array:
        """i32[B, S], prompt and response."""
        ...

    @property
    def mask(self) -> Array:
        """bool[B, S], True at tokens."""
        ...

    @property
    def response_mask(self) -> Array:
        """bool[B, S], True at tokens of the response, its stop token included."""
        ...

    @property
    def index(self) -> Array:
        """i32[B], row of the data set."""
        ...


def texts(
    rollout: Responses, *, decode: Decode, prompts: Sequence[Prompt] | None = None
) -> list[tuple[Any, str]]:
    """(prompt, response) of every row, as a person or a reward reads them.

    Args:
      decode: token ids -> text, without padding, BOS and stop tokens, and with every
        other special token.
      prompts: the prompts as they were written, by row of the data set; None
        decodes their tokens.
    """
    tokens, mask, response_mask, index = (
        np.asarray(array)
        for array in jax.device_get(
            (rollout.tokens, rollout.mask, rollout.response_mask, rollout.index)
        )
    )
    return [
        transcript(
            *row,
            decode=decode,
            prompt=None if prompts is None else prompts[int(number)],
        )
        for *row, number in zip(tokens, mask, response_mask, index, strict=True)
    ]


def observed_of(mask: HostArray, response_mask: HostArray) -> HostArray:
    """bool[..., S], True at observations: tokens read after the response began.

    The same as `batch.Rollout.observed`, on the host.
    """
    began = np.cumsum(response_mask, axis=-1) > 0
    return mask & ~response_mask & began


def transcript(
    tokens: HostArray,
    mask: HostArray,
    response_mask: HostArray,
    *,
    decode: Decode,
    prompt: Prompt | None = None,
) -> tuple[Prompt, str]:
    """(prompt, response) of one row."""
    observed = observed_of(mask, response_mask)
    followed = response_mask | observed
    if prompt is None:
        prompt = decode(tokens[mask & ~followed].tolist())
    if not observed.any():
        return prompt, decode(tokens[response_mask].tolist())
    response, read = tokens[followed], observed[followed]
    starts = np.flatnonzero(read[1:] != read[:-1]) + 1
    runs = zip(np.split(response, starts), np.split(read, starts), strict=True)
    return prompt, "".join(
        f"{OPEN}{text}{CLOSE}" if was_read[0] else text
        for text, was_read in ((decode(run.tolist()), which) for run, which in runs)
    )
