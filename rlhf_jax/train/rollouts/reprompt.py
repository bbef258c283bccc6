"""Prompts of a self-teacher: the prompt with a successful response of its group.

row                0   1   2   3        one group, of which 1 and 3 succeeded
demonstration of   1   3   1   1        the first other success
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.flow.teacher import TeacherPrompts
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row, place
from rlhf_jax.data.text import Question, Written
from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.config.prompts import AskedPrompts
from rlhf_jax.train.rows import question_of

BEFORE = "\nCorrect solution:\n\n"
AFTER = "\n\n\n\nCorrectly solve the original question.\n"
SHORTEST = "x"  # around an empty response the newlines could merge into fewer tokens


class Reprompt:
    """Writes and encodes prompts by the template of Hübotter et al. 2601.20802."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        options: AskedPrompts,
        start: Pretrained,
        success_score: float,
        group_size: int,
        max_new_tokens: int,
    ) -> None:
        """Encodes every prompt with the shortest demonstration, to find the width.

        Raises:
          InputError: the model's context has no room for a demonstration.
        """
        self._rows, self._options, self._start = rows, options, start
        self._score, self._size = success_score, group_size
        self._contract = start.contract()
        bare = self._encoded([(number, SHORTEST) for number in range(len(rows))])
        longest, room = max(map(len, bare)), start.model.max_positions - max_new_tokens
        if longest > room:
            raise InputError(
                f"--success-score: expected prompts of at most {room} tokens with a "
                f"demonstration of one letter, got one of {longest}; lower "
                f"--max-new-tokens, or drop long prompts"
            )
        self._width = min(longest + max_new_tokens, room)  # fixed, for one program

    def __call__(self, shown: Rollout, scores: Scores) -> TeacherPrompts:
        """Returns the teacher's prompt for each response, as the reward saw it.

        A response is not taught if no other response of its group succeeded, or if
        prompt and demonstration exceed the width. Its teacher reads the prompt alone.
        """
        tokens, mask, response_mask, index = processes.whole(
            (shown.tokens, shown.mask, shown.response_mask, shown.index)
        )
        successes = processes.whole(scores.total) >= self._score
        if scores.left_out is not None:
            successes &= ~processes.whole(scores.left_out)
        sources = demonstrations(successes, group_size=self._size)
        taught = np.flatnonzero(sources >= 0)
        texts = {
            int(j): self._start.decode(tokens[j][response_mask[j]].tolist())
            for j in np.unique(sources[taught])
        }
        encoded = self._encoded([(index[row], texts[sources[row]]) for row in taught])
        prompts = mask & (np.cumsum(response_mask, axis=1) == 0)
        read = [row[own].tolist() for row, own in zip(tokens, prompts, strict=True)]
        fits: Any = np.zeros(len(tokens), bool)  # passed as a jax.Array
        for row, prompt in zip(taught, encoded, strict=True):
            if len(prompt) <= self._width:
                read[row], fits[row] = prompt, True
        pad_id = self._start.pad_id
        padded = batches.pad(read, width=self._width, pad_id=pad_id, left=True)
        return TeacherPrompts(*padded, taught=fits)

    def _encoded(self, pairs: Sequence[tuple[int, str]]) -> Sequence[Tokens]:
        """Encodes the prompts of rows, each with a demonstration."""
        field = self._options.prompt_field

        def question(number: int, text: str) -> Question:
            row = self._rows[number]
            own = {**row, field: demonstrated(row[field], text)}
            return question_of(own, options=self._options, where=place(row, number))

        return self._contract.prompts([question(*pair) for pair in pairs])


def demonstrations(successes: np.ndarray, *, group_size: int) -> np.ndarray:
    """Returns i64[B], the row of the first other success in the group, or -1.

    >>> print(demonstrations(np.array([False, True, True, True]), group_size=2))
    [ 1 -1  3  2]
    """
    others = successes.reshape(-1, 1, group_size) & ~np.eye(group_size, dtype=bool)
    first = others.argmax(axis=2) + group_size * np.arange(len(others))[:, None]
    return np.where(others.any(axis=2), first, -1).ravel()


def demonstrated(written: Written, text: str) -> Written:
    """Adds a successful response to a prompt, or to its last message."""
    if isinstance(written, str):
        return f"{written}{BEFORE}{text}{AFTER}"
    *before, last = written
    return [*before, last | {"content": demonstrated(last["content"], text)}]
