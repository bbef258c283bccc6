"""Encodes rows as token lists by the text contract (`text`), and checks lengths."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data import json_lines, lengths
from rlhf_jax.data.examples import Episode, Example, Pair, Text, Tokens
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Question, TextContract, Written, messages, read_question
from rlhf_jax.data.text.messages import AssistantTurns
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDLESS = (
    "the chat template ends a response with no stop token of the model, so sampled ones"
    " go on: add the token that ends a turn to eos_token_id in generation_config.json"
)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_length: int,
    field: str = "prompt",
    stop_ids: Sequence[int] | None = None,
    overlong: Overlong = "error",
    widest: int | None = None,
    more: str = "allow more",
    questions: Sequence[Question] | None = None,
    receipt: Receipt | None = None,
) -> tuple[list[Row], list[Tokens]]:
    """Encodes prompts; returns the rows whose prompts fit, and their tokens.

    Args:
      max_length: the most tokens, the context less the room for the response.
      stop_ids: tokens that end a response, which no text of a prompt becomes; None is
        the tokenizer's EOS.
      overlong: whether a longer prompt is an error or left out.
      widest: tokens of the largest bucket; None is no bucket.
      more: what the errors advise to allow longer prompts.
      questions: the prompts of the rows; None reads them from `field`.
      receipt: records the rows that are left out.

    Raises:
      InputError: a prompt is empty, longer than `max_length` (with overlong="error") or
        than `widest`; none is left; or a prompt has messages and the tokenizer no
        template. Names the row's file and line.
    """
    contract = TextContract(tokenizer, stop_ids=stop_ids, receipt=receipt)
    if questions is None:
        questions = _questions(rows, field=field)
    places, prompts = _places(rows), contract.prompts(questions)
    chats = [question for question in questions if question.is_chat][:1]
    if receipt is not None and not all(map(contract.ends_turns, chats)):
        receipt.note(ENDLESS, where=chats[0].where)
    for tokens, where, row in zip(prompts, places, rows, strict=True):
        lengths.check_prompt(tokens, where=where, of=row[field])
    fits = lengths.fits(
        [len(tokens) for tokens in prompts],
        texts=[row[field] for row in rows],
        places=places,
        max_length=max_length,
        overlong=overlong,
        widest=widest,
        more=more,
        receipt=receipt,
    )
    return [rows[i] for i in fits], [prompts[i] for i in fits]


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_length: int,
    prompt: str = "prompt",
    response: str = "response",
    stop_ids: Sequence[int] | None = None,
    assistant_turns: AssistantTurns = "last",
    overlong: Overlong = "error",
    widest: int | None = None,
    receipt: Receipt | None = None,
) -> list[Text]:
    """Encodes examples of at most `max_length` tokens, prompt and response together.

    Args:
      prompt, response: fields with texts or messages.
      stop_ids: tokens that end a response; a response without one gets the first. None
        is the tokenizer's EOS.
      assistant_turns: which turns of the assistant are learned in a conversation: the
        last, all, or only marked ones. A mark of a message (`weight`, `train` or
        `loss_mask`, 0 or 1) takes precedence.
      widest: tokens of the largest bucket or of a packed row; None is no such limit.
      receipt: records the rows that are left out.

    Returns:
      Examples; an `Episode` if several turns of a conversation are learned.

    Raises:
      InputError: an example is longer than `max_length` (with overlong="error") or than
        `widest`; none is left; or the text contract rejects one. Names the row's file
        and line.
    """
    contract = TextContract(tokenizer, stop_ids=stop_ids, receipt=receipt)
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
    fits = lengths.fits(
        [example.length for example in examples],
        texts=[row[prompt] for row in rows],
        places=_places(rows),
        max_length=max_length,
        overlong=overlong,
        widest=widest,
        receipt=receipt,
    )
    return [examples[i] for i in fits]


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
    """Encodes demonstrations of several turns, of at most `max_length` tokens.

        {"prompt": "3+4+5⏎", "turns": ["calc: 3+4", "⏎7⏎", "calc: 7+5", "⏎12⏎", "= 12"]}

        response  calc: 3+4<eos>⏎7⏎calc: 7+5<eos>⏎12⏎= 12<eos>
        observed                ---              ----

    Args:
      prompt, turns: fields with the prompt, and with alternating responses and
        observations. All are texts, or the prompt and observations are messages.

    Other arguments and errors are as in `encode_demonstrations`.
    """
    contract = TextContract(tokenizer, stop_ids=stop_ids, receipt=receipt)
    questions = _questions(rows, field=prompt)
    for question in questions:
        if question.is_chat:
            asked = [*question.messages, messages.of_assistant("")]
            messages.check_unmarked(asked, where=question.where)
    begun = zip(questions, rows, contract.prompts(questions), strict=True)
    episodes = [
        _episode(contract, question, row[turns], begins=begins)
        for question, row, begins in progress.track(
            begun, "episodes to tokens", total=len(rows)
        )
    ]
    fits = lengths.fits(
        [episode.length for episode in episodes],
        texts=[row[prompt] for row in rows],
        places=_places(rows),
        max_length=max_length,
        overlong=overlong,
        widest=widest,
        receipt=receipt,
    )
    return [episodes[i] for i in fits]


def encode_preferences(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_length: int,
    margin: str | None = None,
    stop_ids: Sequence[int] | None = None,
    overlong: Overlong = "error",
    widest: int | None = None,
    packed: bool = False,
    receipt: Receipt | None = None,
) -> list[Pair]:
    """Encodes pairs whose prompt and longer response have at most `max_length` tokens.

    Args:
      margin: the field with the margin, in reward units; None for no margins.
      packed: whether a row of `widest` tokens must hold both texts of a pair, each with
        its prompt, which must not be empty.

    Other arguments are as in `encode_demonstrations`.

    Raises:
      InputError: both responses are the same tokens, or a margin is not a finite
        number; or as `encode_demonstrations`.
    """
    contract = TextContract(tokenizer, stop_ids=stop_ids, receipt=receipt)
    questions, places = _questions(rows, field="prompt"), _places(rows)
    for question, row in zip(questions, rows, strict=True):
        for side in ("chosen", "rejected") if question.is_chat else ():
            conversation = [*question.messages, *messages.as_turn(row[side])]
            messages.check_unmarked(conversation, where=question.where)
    prompts = contract.prompts(questions)
    responses = functools.partial(contract.responses, questions, prompts=prompts)
    chosen = responses([row["chosen"] for row in rows])
    rejected = responses([row["rejected"] for row in rows])
    margins = [
        _margin(where, row, margin) for where, row in zip(places, rows, strict=True)
    ]
    pairs = list(map(Pair, prompts, chosen, rejected, margins))
    fits = lengths.fits(
        [pair.length for pair in pairs],
        texts=[row["prompt"] for row in rows],
        places=places,
        max_length=max_length,
        overlong=overlong,
        widest=None if packed else widest,
        receipt=receipt,
    )
    if receipt is not None and margin is not None:
        receipt.reads(margin)
    for i in fits:
        if packed:
            _check_packed(pairs[i], rows[i], where=places[i], widest=widest)
        if pairs[i].chosen == pairs[i].rejected:
            raise InputError(
                f"{places[i]}: expected responses that differ in a token, got "
                f"{rows[i]['chosen']!r:.40} and {rows[i]['rejected']!r:.40}, which the "
                f"tokenizer reads alike; remove the pair"
            )
    return [pairs[i] for i in fits]


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    block_size: int,
    receipt: Receipt | None = None,
) -> list[Example]:
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
    tokens = TextContract(tokenizer).written(text, special=False)
    checks.within(
        least=2,
        advice="the first token is never predicted",
        **{"tokens of a block": block_size, "tokens of the text": len(tokens)},
    )
    blocks = [
        Example((), tokens[start : start + block_size])
        for start in range(0, len(tokens) - 1, block_size - 1)
    ]
    if receipt is not None:
        receipt.text(len(blocks), size=block_size)
    return blocks


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
    learned = messages.learned_turns(conversation, which=which, where=question.where)
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
