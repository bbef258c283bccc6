"""Demonstrations of several turns: the responses are learned, the observations read.

row        {"prompt": "7+5⏎", "turns": ["calc: 7+5", "= 12⏎", "answer: 12"]}

tokens     7+5⏎ calc: 7+5 E = 12⏎ answer: 12 E        E: the stop token
learned         ----------         -----------
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data import chat, encoding, json_lines, lengths, tokenization
from rlhf_jax.data.encoding import Example, Written
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.turns.encoder import OPENING, TurnEncoder
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURNS = "turns"
SPOKEN = {"role": chat.ASSISTANT, "content": "Hi"}


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_length: int,
    prompt: str = "prompt",
    response: str = "response",
    stop_ids: Sequence[int] | None = None,
    overlong: Overlong = "error",
    widest: int | None = None,
) -> list[Example]:
    """As `encoding.encode_demonstrations`, also of rows with `turns`.

    Raises:
      InputError: as there; or turns are not responses and observations by turns.
    """
    options: dict[str, Any] = {
        "prompt": prompt,
        "response": response,
        "stop_ids": stop_ids,
    }
    if not any(TURNS in row and response not in row for row in rows):
        return encoding.encode_demonstrations(
            tokenizer,
            rows,
            max_length=max_length,
            overlong=overlong,
            widest=widest,
            **options,
        )
    places = [json_lines.place(row, i) for i, row in enumerate(rows)]
    episodes = [
        _turns(row, response, where=where, in_chat=not isinstance(row[prompt], str))
        for row, where in zip(rows, places, strict=True)
    ]
    asked = [
        row | {prompt: _before(row[prompt], turns[place - 1 : place]), response: said}
        for row, turns in zip(rows, episodes, strict=True)
        for place, said in enumerate(turns)
        if place % 2 == 0
    ]
    spoken = iter(
        encoding.encode_demonstrations(
            tokenizer, asked, max_length=sys.maxsize, **options
        )
    )
    stops = tuple(stop_ids) if stop_ids else (tokenization.eos_token_id(tokenizer),)
    encoders = {
        in_chat: TurnEncoder(tokenizer, stop_ids=stops, chat=in_chat)
        for in_chat in {not isinstance(row[prompt], str) for row in rows}
    }
    examples = []
    for row, turns, where in zip(rows, episodes, places, strict=True):
        encoder = encoders[not isinstance(row[prompt], str)]
        tokens: list[int] = []
        observed: list[bool] = []
        for place, turn in enumerate(turns):
            ids = (
                encoder.observation(turn, where=where)
                if place % 2
                else next(spoken).response
            )
            tokens += ids
            observed += [bool(place % 2)] * len(ids)
        examples.append(
            Example(encoder.prompt(row[prompt], where=where), tokens, observed)
        )
    fits = lengths.fits(
        [len(each.prompt) + len(each.response) for each in examples],
        texts=[row[prompt] for row in rows],
        places=places,
        max_length=max_length,
        overlong=overlong,
        widest=widest,
    )
    return [examples[i] for i in fits]


def _before(prompt: Written, observation: list[Written]) -> Written:
    """What stands before a response: the prompt, or an observation after a turn."""
    if not observation:
        return prompt
    seen = observation[0]
    if isinstance(prompt, str):
        return seen
    messages = [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
    return [OPENING, SPOKEN, *messages]


def _turns(row: Row, response: str, *, where: str, in_chat: bool) -> list[Any]:
    """The row's turns; its response is one."""
    if response in row:
        return [row[response]]
    turns = row[TURNS]
    if not isinstance(turns, list) or len(turns) % 2 == 0:
        raise InputError(
            f"{where}: expected responses and observations by turns in {TURNS!r}, a"
            f" response first and last, got {turns!r:.60}; give a list of 1, 3, 5, ..."
        )
    for place, turn in enumerate(turns):
        if place % 2 and in_chat and isinstance(turn, list):
            chat.check_messages(turn, where=where, field=TURNS)
        elif not isinstance(turn, str):
            kind = "an observation" if place % 2 else "a response"
            raise InputError(
                f"{where}: expected {kind} as entry {place} (from 0) of {TURNS!r}, a"
                f" text, got {turn!r:.60}; observations are messages where the prompt"
                " is, too"
            )
    return turns
