"""Rewards that are Python functions of texts: they run on the host, between programs.

rollout ─read─> prompts, responses, rows ─function─> one number per response

The function gets copies: its changes to lists and rows have no effect elsewhere. It
runs in this process, so `os._exit` or a crash of C code ends the run too;
`verification/pool.py` runs verifiers in other processes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, NoReturn

import numpy as np

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.rewards import transcripts
from rlhf_jax.roles.rewards.transcripts import Decode, Prompt, Responses

HostArray = np.ndarray[Any, Any]
Row = Mapping[str, Any]  # one row of the user's data, every field of it
SHOWN = 300  # characters of a text in a message
SHOWN_VALUE = 80  # characters of a returned value in a message
# A prompt is a list of messages if the row has one, else a text.
TextFunction = Callable[[list[Any], list[str], list[Row]], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Texts:
    """A rollout as a Python function sees it; one entry per response."""

    prompts: list[Prompt]
    responses: list[str]
    rows: list[Row]
    index: HostArray  # i32[B], row of the data set

    def only(self, place: int) -> Texts:
        """The record of one response."""
        at = slice(place, place + 1)
        return Texts(
            self.prompts[at], self.responses[at], self.rows[at], self.index[at]
        )

    def show(self, place: int) -> str:
        """Describes a prompt, for an error message."""
        where = f"row {int(self.index[place])} of the data"
        prompt = self.prompts[place]
        text = prompt if isinstance(prompt, str) else prompt[-1].get("content", "")
        return f"prompt {_cut(str(text))} ({where})"

    def show_both(self, place: int) -> str:
        """Describes a prompt and its response, for an error message."""
        return f"{self.show(place)} and response {_cut(self.responses[place])}"


def read(
    rollout: Responses,
    *,
    decode: Decode,
    rows: Sequence[Row],
    prompts: Sequence[Prompt] | None = None,
) -> Texts:
    """The texts of a rollout, without padding, and the data rows that they belong to.

    The response of an episode of several turns is its `transcript`, with observations
    marked.

    Args:
      prompts: the prompts as they were written, texts or messages, by row of the data
        set; None decodes their tokens.
    """
    texts = transcripts.texts(rollout, decode=decode, prompts=prompts)
    index = np.asarray(rollout.index)
    return Texts(
        prompts=[prompt for prompt, _ in texts],
        responses=[response for _, response in texts],
        rows=[rows[i] for i in index],
        index=index,
    )


@dataclasses.dataclass(frozen=True)
class TextReward:
    """A Python function of decoded texts and data rows, run on the host."""

    TAKES: ClassVar = ("prompts", "responses", "rows")  # arguments of the function

    # (prompts, responses, rows) -> one number per response. The three lists have one
    # entry per response, rows have every field of the user's data, and all are copies.
    function: TextFunction
    decode: Decode  # token ids -> text, as in `transcripts.texts`
    rows: Sequence[Row]  # the data set that `rollout.index` points into
    called: str = "the reward function"  # in messages, as "--judge my_judges:score"
    prompts: Sequence[Prompt] | None = None  # as written; None decodes their tokens

    def __call__(self, rollout: Responses) -> HostArray:
        """Scores a rollout, f32[B].

        Raises:
          InputError: the function raised (names the prompt), or did not return B finite
            numbers (names the first bad entry).
          StopError: the function called `sys.exit`.
        """
        texts = read(rollout, decode=self.decode, rows=self.rows, prompts=self.prompts)
        if not texts.responses:  # of a process without rows of its own
            return np.zeros(0, np.float32)
        returned, error = self._call(texts)
        if error is not None:
            self._refuse(texts, error)
        return self._scores(returned, texts)

    def _call(self, texts: Texts) -> tuple[Any, BaseException | None]:
        """Calls the function on copies; returns its result, and its error if any."""
        rows = [copy.deepcopy(row) for row in texts.rows]  # one by one: none is shared
        try:
            prompts = copy.deepcopy(texts.prompts)
            return self.function(prompts, [*texts.responses], rows), None
        except (Exception, SystemExit) as error:
            return None, error

    def _refuse(self, texts: Texts, error: BaseException) -> NoReturn:
        size = len(texts.prompts)
        where = f"a batch of {size}, though for none of its responses alone"
        # Calls the function on one response at a time to find the prompt.
        for i in range(size):
            _, single = self._call(texts.only(i))
            if single is not None:
                error, where = single, texts.show_both(i)
                break
        if isinstance(error, SystemExit):
            raise StopError(
                f"{self.called} called sys.exit({_shown(error.code)}) for {where}; "
                f"return a score, or raise an error to stop the run"
            ) from error
        raise InputError(
            f"{self.called} raised {_named(error)} for {where}; mend it, or return a "
            f"score for such a response"
        ) from error

    def _scores(self, returned: Any, texts: Texts) -> HostArray:
        """f32[B] of what the function returned; InputError unless B finite numbers."""
        size = len(texts.prompts)
        entries, wrong = _entries(returned)
        if not wrong and len(entries) != size:
            wrong = f"{len(entries)}" if len(entries) else "an empty list"
        if wrong:
            raise InputError(
                f"expected {self.called} to return {size} numbers, one per response, "
                f"got {wrong}; return a list of floats in the order of the responses"
            )
        with np.errstate(over="ignore"):  # overflow is inf, which is reported below
            if not isinstance(entries, np.ndarray) or entries.dtype.kind not in "biuf":
                entries = [self._number(i, one, texts) for i, one in enumerate(entries)]
            scores = np.array(entries, np.float32)
        bad = np.flatnonzero(~np.isfinite(scores))
        if len(bad):
            i = int(bad[0])
            others = f" and at {len(bad) - 1} others" if len(bad) > 1 else ""
            raise InputError(
                f"expected {self.called} to return finite numbers, got {scores[i]} at "
                f"index {i} of {size}{others}, for {texts.show_both(i)}; return a "
                f"finite number for every response"
            )
        return scores

    def _number(self, i: int, entry: Any, texts: Texts) -> float:
        got, why = f"{_shown(entry)} ({type(entry).__name__})", ""
        if entry is None:
            got, why = "None", ", as a function without a `return` gives"
        elif not isinstance(entry, _NO_NUMBERS):
            try:
                if not np.shape(entry):  # an array of one entry is no number
                    return float(entry)
            except OverflowError:
                return float("inf")
            except Exception as error:  # a user's object may raise anything
                why = "" if isinstance(error, TypeError) else f" ({_named(error)})"
        raise InputError(
            f"expected {self.called} to return a number for every response, got {got} "
            f"at index {i} of {len(texts.prompts)}{why}, for {texts.show_both(i)}; "
            f"return a float there"
        )


# Types with a length, or convertible to float, that are surely a mistake.
_NO_LISTS = (str, bytes, Mapping, Set)
_NO_NUMBERS = (str, bytes, np.complexfloating)


def _entries(returned: Any) -> tuple[Sequence[Any] | HostArray, str]:
    """The entries of a list or an array, and what it is instead, "" if it is one."""
    kind = type(returned).__name__
    try:
        if hasattr(returned, "__array__"):
            array = np.asarray(returned)
            if not array.ndim:
                return (), f"the number {_shown(returned)} alone"
            return array, f"shape {array.shape}" if array.ndim > 1 else ""
        if hasattr(returned, "__len__") and not isinstance(returned, _NO_LISTS):
            return list(returned), ""
    except Exception as error:  # a user's object may raise anything
        return (), f"{kind}, which cannot be read: {_named(error)}"
    return (), "None" if returned is None else f"{_shown(returned)} ({kind})"


def _shown(value: Any) -> str:
    try:
        return _shortened(repr(value), SHOWN_VALUE)
    except Exception as error:  # its own __repr__ raised
        return f"a value that cannot be shown ({type(error).__name__})"


def _named(error: BaseException) -> str:
    try:
        return _shortened(f"{type(error).__name__}: {error}", SHOWN)
    except Exception:  # its own __str__ raised
        return f"{type(error).__name__}, which cannot be shown"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _cut(text: str) -> str:
    return repr(_shortened(text, SHOWN))
