"""Rows of a rollout as text: the prompt, and what follows it in order.

    prompt      Guess a number from 1 to 8.
    response    4⟦higher⟧6⟦right⟧

Of one turn the response is the text of its sampled tokens. Between and after turns,
what the policy read stands in brackets, so that nobody takes it for its own words. The
policy can write such brackets itself: they mark observations for a reader, and are no
proof of one for a reward. The tokens' masks are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

HostArray = np.ndarray[Any, Any]
Decode = Callable[[list[int]], str]
OPEN, CLOSE = "⟦", "⟧"  # around what was observed


def observed_of(mask: HostArray, response_mask: HostArray) -> HostArray:
    """bool[..., S]: tokens that the policy read after it had begun to respond.

    It is `batch.Rollout.observed`, on the host.

    Args:
      mask: bool[..., S], not padding.
      response_mask: bool[..., S], sampled tokens.
    """
    began = np.cumsum(response_mask, axis=-1) > 0
    return mask & ~response_mask & began


def transcript(
    tokens: HostArray, mask: HostArray, response_mask: HostArray, *, decode: Decode
) -> tuple[str, str]:
    """(prompt, response) of one row.

    Args:
      tokens: i32[S].
      mask: bool[S], not padding.
      response_mask: bool[S], sampled tokens.
      decode: token ids -> text.

    Returns:
      Texts; of several turns the response has observations in brackets.
    """
    observed = observed_of(mask, response_mask)
    followed = response_mask | observed
    prompt = decode(tokens[mask & ~followed].tolist())
    if not observed.any():
        return prompt, decode(tokens[response_mask].tolist())
    said, read = tokens[followed], observed[followed]
    starts = np.flatnonzero(read[1:] != read[:-1]) + 1
    runs = zip(np.split(said, starts), np.split(read, starts), strict=True)
    return prompt, "".join(
        f"{OPEN}{text}{CLOSE}" if was_read[0] else text
        for text, was_read in ((decode(run.tolist()), which) for run, which in runs)
    )
