"""Rewards that are Python functions of texts: they run on the host, between programs.

rollout ─read─> prompts, responses, rows ─function─> one number a response
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from rlhf_jax.functional.checks import InputError

Array = jax.Array
HostArray = np.ndarray[Any, Any]
Decode = Callable[[list[int]], str]
Row = Mapping[str, Any]  # one row of the user's data, every field of it
SHOWN = 300  # characters of a text in a message
TextFunction = Callable[[list[str], list[str], list[Row]], Sequence[float]]


class Responses(Protocol):
    """What a reward reads of `batch.Rollout`."""

    @property
    def tokens(self) -> Array: ...  # i32[B, S]
    @property
    def mask(self) -> Array: ...  # bool[B, S], not padding
    @property
    def response_mask(self) -> Array: ...  # bool[B, S]
    @property
    def index(self) -> Array: ...  # i32[B], row of the data set


@dataclasses.dataclass(frozen=True)
class Texts:
    """A rollout as a Python function sees it; one entry a response."""

    prompts: list[str]
    responses: list[str]
    rows: list[Row]
    index: HostArray  # i32[B], row of the data set

    @property
    def lists(self) -> tuple[list[str], list[str], list[Row]]:
        """What a function of texts takes."""
        return self.prompts, self.responses, self.rows

    def show(self, place: int) -> str:
        """Which prompt it is, for a message."""
        where = f"row {int(self.index[place])} of the data"
        return f"prompt {_cut(self.prompts[place])} ({where})"

    def show_both(self, place: int) -> str:
        """Which prompt and response."""
        return f"{self.show(place)} and response {_cut(self.responses[place])}"


def read(rollout: Responses, *, decode: Decode, rows: Sequence[Row]) -> Texts:
    """The texts of a rollout, without padding, and the rows they belong to.

    Args:
      decode: token ids -> text; the tokenizer's, with special tokens left out.
      rows: the data set that `rollout.index` points into.
    """
    tokens, mask, response_mask, index = (
        np.asarray(array)
        for array in jax.device_get(
            (rollout.tokens, rollout.mask, rollout.response_mask, rollout.index)
        )
    )
    return Texts(
        prompts=_decode_rows(decode, tokens, mask & ~response_mask),
        responses=_decode_rows(decode, tokens, response_mask),
        rows=[rows[i] for i in index],
        index=index,
    )


@dataclasses.dataclass(frozen=True)
class TextReward:
    """A Python function of decoded texts and data rows, run on the host.

    Args:
      function: (prompts, responses, rows) -> one number a response; the three lists
        have one entry a response, and rows hold every field of the user's data.
      decode: token ids -> text; the tokenizer's, with special tokens left out.
      rows: the data set that `rollout.index` points into.
    """

    function: TextFunction
    decode: Decode
    rows: Sequence[Row]

    def __call__(self, rollout: Responses) -> HostArray:
        """f32[B].

        Raises:
          InputError: the function raised, or a number is not finite, and it names the
            prompt; or it did not return B numbers.
        """
        texts = read(rollout, decode=self.decode, rows=self.rows)
        call = functools.partial(_call, self.function)
        try:
            return _checked(call(*texts.lists), texts=texts)
        except _RewardFailed as failure:
            # One at a time, to find which prompt it was.
            for i, one in enumerate(zip(*texts.lists, strict=True)):
                try:
                    call(*([item] for item in one))
                except _RewardFailed as single:
                    raise InputError(
                        f"the reward function raised {single} for "
                        f"{texts.show_both(i)}; mend it, or return a score for such a "
                        f"response"
                    ) from single.__cause__
            raise InputError(
                f"the reward function raised {failure} for a batch of "
                f"{len(texts.prompts)}, though for none of its responses alone; mend it"
            ) from failure.__cause__


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


class _RewardFailed(Exception):
    pass


def _call(function: TextFunction, *lists: Any) -> Any:
    try:
        return function(*lists)
    except Exception as error:
        raise _RewardFailed(f"{type(error).__name__}: {error}"[:SHOWN]) from error


def _checked(returned: Any, *, texts: Texts) -> HostArray:
    size = len(texts.prompts)
    try:
        with np.errstate(over="ignore"):  # too large is inf, which is named below
            scores = np.asarray(returned, np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"expected the reward function to return {size} numbers, got "
            f"{type(returned).__name__}: {error}; return a list of floats"
        ) from error
    if scores.shape != (size,):
        raise InputError(
            f"expected the reward function to return {size} numbers, one a response, "
            f"got shape {scores.shape}; return a list or a 1-D array"
        )
    if not np.isfinite(scores).all():
        bad = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise InputError(
            f"expected finite scores, got {scores[bad]} for {texts.show(bad)}; return "
            f"a number for every response"
        )
    return scores


def _decode_rows(decode: Decode, tokens: HostArray, mask: HostArray) -> list[str]:
    return [decode(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]
