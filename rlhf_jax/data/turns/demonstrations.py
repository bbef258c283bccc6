"""Demonstrations of several turns to tokens, as a run of episodes has them.

{"prompt": "3+4+5⏎", "turns": ["calc: 3+4", "⏎7⏎", "calc: 7+5", "⏎12⏎", "= 12"]}

prompt    3+4+5⏎
response  calc: 3+4<eos>⏎7⏎calc: 7+5<eos>⏎12⏎= 12<eos>
observed                ---              ----
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data import json_lines, lengths
from rlhf_jax.data.examples import Episode
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Question, TextContract, Written, messages, read_question
from rlhf_jax.runs import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_episodes(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_length: int,
    prompt: str = "prompt",
    turns: str = "turns",
    stop_ids: Sequence[int] | None = None,
    overlong: Overlong = "error",
    widest: int | None = None,
    receipt: Receipt | None = None,
) -> list[Episode]:
    """Episodes of at most `max_length` tokens, whose responses are trained on.

    Args:
      prompt, turns: fields with the prompt, and with responses and observations in
        turn; texts, or a prompt and observations of messages for the chat template.
      stop_ids: tokens that end a response, of which the first is given to a text
        without one; None is the tokenizer's EOS.
      widest: tokens of the largest bucket or of a packed row; None is no such limit.
      receipt: is told of the rows that are left out.

    Raises:
      InputError: as `encoding.encode_demonstrations`.
    """
    contract = TextContract(tokenizer, stop_ids=stop_ids, receipt=receipt)
    begun = [
        read_question(row, field=prompt, where=json_lines.place(row, number))
        for number, row in enumerate(rows)
    ]
    for question in begun:
        if question.is_chat:
            messages.check_unmarked(
                [*question.messages, messages.of_assistant("")], where=question.where
            )
    prompts = contract.prompts(begun)
    episodes = [
        _episode(contract, question, row[turns], begins=begins)
        for question, row, begins in progress.track(
            zip(begun, rows, prompts, strict=True),
            "episodes to tokens",
            total=len(rows),
        )
    ]
    fits = lengths.fits(
        [episode.length for episode in episodes],
        texts=[row[prompt] for row in rows],
        places=[question.where for question in begun],
        max_length=max_length,
        overlong=overlong,
        widest=widest,
        receipt=receipt,
    )
    return [episodes[i] for i in fits]


def _episode(
    contract: TextContract,
    question: Question,
    turns: Sequence[Written],
    *,
    begins: list[int],
) -> Episode:
    """An episode of responses and observations in turn, behind its prompt."""
    chat = question.is_chat
    ids, before = list(begins), question
    observed: list[tuple[int, int]] = []
    for place, turn in enumerate(turns):
        start = len(ids) - len(begins)
        if place % 2:
            before = question._replace(written=turn)
            ids += contract.between(before, chat=chat)
            observed.append((start, len(ids) - len(begins)))
        elif not chat and place == 0:
            ids += contract.responses([question], [str(turn)], prompts=[begins])[0]
        elif chat:
            ids += contract.chat_turn(str(turn), question=question)
        else:
            ids += contract.turn(str(turn), behind=before, after=ids)
    return Episode(begins, ids[len(begins) :], tuple(observed))
