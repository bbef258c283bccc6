"""Encodes rows as token lists by the text contract (`text`), and checks lengths."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_jax.data import json_lines, lengths
from rlhf_jax.data.examples import Episode, Example, Pair, Text, Tokens
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import Question, TextContract, Written, messages, read_question
from rlhf_jax.data.text.messages import AssistantTurns
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.runs import progress

ENDLESS = (
    "the chat template ends a response with no stop token of the model, so sampled ones"
    " go on: add the token that ends a turn to eos_token_id in generation_config.json"
)


def encode_prompts(
    contract: TextContract,
    rows: Sequence[Row],
    *,
    limits: Limits,
    field: str = "prompt",
    questions: Sequence[Question] | None = None,
) -> tuple[list[Row], list[Tokens]]:
    """Encodes prompts; returns the rows whose prompts fit, and their tokens.

    Args:
      contract: how text becomes tokens; its receipt records the rows that are left out.
      limits: on a prompt: the context less the room for the response.
      questions: the prompts of the rows; None reads them from `field`.

    Raises:
      InputError: a prompt is empty or beyond its limits; none is left; or a prompt has
        messages and the tokenizer no template. Names the row's file and line.
    """
    if questions is None:
        questions = _questions(rows, field=field)
    prompts = contract.prompts(questions)
    chats = [question for question in questions if question.is_chat][:1]
    if contract.receipt is not None and not all(map(contract.ends_turns, chats)):
        contract.receipt.note(ENDLESS, where=chats[0].where)
    for tokens, where, row in zip(prompts, _places(rows), rows, strict=True):
        lengths.check_prompt(tokens, where=where, of=row[field])
    fits = _fitting(map(len, prompts), rows, field, contract=contract, limits=limits)
    return [rows[i] for i in fits], [prompts[i] for i in fits]


def encode_demonstrations(
    contract: TextContract,
    rows: Sequence[Row],
    *,
    limits: Limits,
    prompt: str = "prompt",
    response: str = "response",
    assistant_turns: AssistantTurns = "last",
) -> list[Text]:
    """Encodes examples, a prompt and a response each.

    Args:
      contract, limits: as in `encode_prompts`, with limits on a whole example.
      prompt, response: fields with texts or messages.
      assistant_turns: which turns of the assistant are learned in a conversation: the
        last, all, or only marked ones. A mark of a message (`weight`, `train` or
        `loss_mask`, 0 or 1) takes precedence.

    Returns:
      Examples; an `Episode` if several turns of a conversation are learned.

    Raises:
      InputError: an example is beyond the limits; none is left; or the text contract
        rejects one. Names the row's file and line.
    """
    questions = _questions(rows, field=prompt)
    written = [row[response] for row in rows]
    examples = contract.examples(
        questions,
        written,
        turns=[
            _learned(question, text, which=assistant_turns)
            for question, text in zip(questions, written, strict=True)
        ],
    )
    sizes = [example.length for example in examples]
    fits = _fitting(sizes, rows, prompt, contract=contract, limits=limits)
    return [examples[i] for i in fits]


def encode_episodes(
    contract: TextContract,
    rows: Sequence[Row],
    *,
    limits: Limits,
    prompt: str = "prompt",
    turns: str = "turns",
) -> list[Episode]:
    """Encodes demonstrations of several turns.

        {"prompt": "3+4+5⏎", "turns": ["calc: 3+4", "⏎7⏎", "calc: 7+5", "⏎12⏎", "= 12"]}

        response  calc: 3+4<eos>⏎7⏎calc: 7+5<eos>⏎12⏎= 12<eos>
        observed                ---              ----

    Args:
      prompt, turns: fields with the prompt, and with alternating responses and
        observations. All are texts, or the prompt and observations are messages.

    Other arguments and errors are as in `encode_demonstrations`.
    """
    questions = _questions(rows, field=prompt)
    for question in questions:
        if question.is_chat:
            asked = [*question.messages, messages.of_assistant("")]
            with located(question.where):
                messages.check_unmarked(asked)
    begun = zip(questions, rows, contract.prompts(questions), strict=True)
    episodes = [
        _episode(contract, question, row[turns], begins=begins)
        for question, row, begins in progress.track(
            begun, "episodes to tokens", total=len(rows)
        )
    ]
    sizes = [episode.length for episode in episodes]
    fits = _fitting(sizes, rows, prompt, contract=contract, limits=limits)
    return [episodes[i] for i in fits]


def encode_preferences(
    contract: TextContract,
    rows: Sequence[Row],
    *,
    limits: Limits,
    margin: str | None = None,
    packed: bool = False,
) -> list[Pair]:
    """Encodes pairs; the limits are on the prompt with the longer response.

    Args:
      margin: the field with the margin, in reward units; None for no margins.
      packed: whether a row of `limits.widest` tokens must hold both texts of a pair,
        each with its prompt, which must not be empty.

    Other arguments are as in `encode_demonstrations`.

    Raises:
      InputError: both responses are the same tokens, or a margin is not a finite
        number; or as `encode_demonstrations`.
    """
    questions, places = _questions(rows, field="prompt"), _places(rows)
    for question, row in zip(questions, rows, strict=True):
        for side in ("chosen", "rejected") if question.is_chat else ():
            conversation = [*question.messages, *messages.as_turn(row[side])]
            with located(question.where):
                messages.check_unmarked(conversation)
    prompts = contract.prompts(questions)
    responses = functools.partial(contract.responses, questions, prompts=prompts)
    chosen = responses([row["chosen"] for row in rows])
    rejected = responses([row["rejected"] for row in rows])
    margins = [
        _margin(where, row, margin) for where, row in zip(places, rows, strict=True)
    ]
    pairs = list(map(Pair, prompts, chosen, rejected, margins))
    width, sizes = limits.widest, [pair.length for pair in pairs]
    if packed:  # then it limits the pair
        limits = dataclasses.replace(limits, widest=None)
    fits = _fitting(sizes, rows, "prompt", contract=contract, limits=limits)
    if contract.receipt is not None and margin is not None:
        contract.receipt.reads(margin)
    for i in fits:
        if packed:
            _check_packed(pairs[i], rows[i], where=places[i], widest=width)
        if pairs[i].chosen == pairs[i].rejected:
            raise InputError(
                f"{places[i]}: expected responses that differ in a token, got "
                f"{rows[i]['chosen']!r:.40} and {rows[i]['rejected']!r:.40}, which the "
                f"tokenizer reads alike; remove the pair"
            )
    return [pairs[i] for i in fits]


def encode_text(contract: TextContract, text: str, *, block_size: int) -> list[Example]:
    """Cuts plain text into blocks of `block_size` tokens, the last one shorter.

        tokens   0 1 2 3 4 5 6 7      block_size = 4
        blocks   0 1 2 3
                       3 4 5 6
                             6 7

    Neighbours share one token, since no token predicts the first one of a row. So the
    loss reads each token of the text but the first exactly once.

    Raises:
      InputError: the text or the block size has fewer than two tokens.
    """
    tokens = contract.written(text, special=False)
    checks.within(
        least=2,
        advice="the first token is never predicted",
        **{"tokens of a block": block_size, "tokens of the text": len(tokens)},
    )
    blocks = [
        Example((), tokens[start : start + block_size])
        for start in range(0, len(tokens) - 1, block_size - 1)
    ]
    if contract.receipt is not None:
        contract.receipt.text(len(blocks), size=block_size)
    return blocks


def _fitting(
    sizes: Iterable[int],
    rows: Sequence[Row],
    field: str,
    *,
    contract: TextContract,
    limits: Limits,
) -> list[int]:
    """Returns the indices of the rows within the limits; errors show the `field`."""
    texts, receipt = [row[field] for row in rows], contract.receipt
    return limits.fitting([*sizes], texts=texts, places=_places(rows), receipt=receipt)


def _places(rows: Sequence[Row]) -> list[str]:
    return [json_lines.place(row, i) for i, row in enumerate(rows)]


def _questions(rows: Sequence[Row], *, field: str) -> list[Question]:
    return [
        read_question(row, field=field, where=where)
        for row, where in zip(rows, _places(rows), strict=True)
    ]


def _learned(
    question: Question, response: Written, *, which: AssistantTurns
) -> list[int] | None:
    """Returns the indices of learned messages; None if only the response is learned."""
    if not question.is_chat:
        return None
    conversation = [*question.messages, *messages.as_turn(response)]
    with located(question.where):
        learned = messages.learned_turns(conversation, which=which)
    return None if learned == [len(conversation) - 1] else learned


def _episode(
    contract: TextContract,
    question: Question,
    turns: Sequence[Written],
    *,
    begins: list[int],
) -> Episode:
    chat = question.is_chat
    ids, before = list(begins), question
    observed: list[tuple[int, int]] = []
    for place, turn in enumerate(turns):
        start = len(ids) - len(begins)
        if place % 2:
            before = question._replace(written=turn)
            ids += contract.between(before, chat=chat)
            observed.append((start, len(ids) - len(begins)))
        elif chat:
            ids += contract.chat_turn(str(turn), question=question)
        elif place == 0:
            ids += contract.responses([question], [str(turn)], prompts=[begins])[0]
        else:
            ids += contract.turn(str(turn), behind=before, after=ids)
    return Episode(begins, ids[len(begins) :], tuple(observed))


def _check_packed(pair: Pair, row: Row, *, where: str, widest: int | None) -> None:
    """Raises InputError unless a packed row can hold the pair."""
    lengths.check_prompt(pair.prompt, where=where, of=row["prompt"])
    if widest is not None:
        lengths.check(
            2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected),
            widest,
            where=where,
            holds=", the width of a row, for both texts with their prompts",
            of=row["prompt"],
            remedy="make rows wider, or remove the pair",
        )


def _margin(where: str, row: Row, field: str | None) -> float | None:
    if field is None:
        return None
    value: Any = row.get(field)
    if type(value) not in (int, float) or not abs(value) <= checks.LARGEST_FLOAT:
        raise InputError(
            f"{where}: expected a finite float32 number in {field!r}, got"
            f" {value!r:.40}; correct the row, or name the field that holds the margin"
        )
    return float(value)
