"""Files and Hugging Face data sets to rows.

    file ─data─> rows ─encoding─> token lists ─batches─> batches[step]

A row is a dict that keeps all its fields: a Python reward is given the rows. What is
asked and answered is a text, or messages for a chat template (`chat`). A row that was
read from a file knows its line (`json_lines`), so that every later error can name it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_jax.data import json_lines
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import messages as chat
from rlhf_jax.functional.checks import InputError

Blank = Literal["keep", "drop", "error"]

ASSISTANT = "\n\nAssistant:"  # hh-rlhf: what stands before each response
HUMAN = "\n\nHuman:"  # and before each turn of the other side
SIDES = ("chosen", "rejected")
BLANK = "a response of nothing but white space"  # why a row is left out
TURNS = "turns"  # of a demonstration: responses, and what was observed between them


class Reading(NamedTuple):
    """What a row of a file becomes."""

    rows: Sequence[Row]  # none where it is left out as its response is blank
    reads: tuple[str, ...]  # the fields that were read
    num_texts: int = 1  # that the row counts for in the receipt


def read_prompts(
    source: str | Path,
    *,
    field: str = "prompt",
    beside: str | None = None,
    receipt: Receipt | None = None,
) -> list[Row]:
    """Rows with a text or messages in `field`; a .txt file has one prompt a line.

    Args:
      beside: a further field with a prompt, a teacher's.
      receipt: is told of every row and the fields that are read.

    Raises:
      InputError: the file is empty or malformed, or a row has no prompt in a field.
    """
    fields = (field,) if beside is None else (field, beside)

    def read(where: str, row: Row) -> Reading:
        prompts = [_read_prompt(where, row, name) for name in fields]
        others = [name for prompt in prompts for name in _read_beside(prompt)]
        return Reading([row], (*fields, *others))

    return read_rows(source, read, text=field, receipt=receipt)


def read_demonstrations(
    source: str | Path,
    *,
    prompt: str = "prompt",
    response: str = "response",
    turns: bool = False,
    receipt: Receipt | None = None,
) -> list[Row]:
    """Rows with texts in the fields named by `prompt` and `response`, or messages.

    Rows with a whole conversation in `messages` instead of a response are cut before
    its last turn, which is the response. With `turns` rows may have "turns" instead of
    a response: responses and observations in turn, from the first response to the last.

    Args:
      receipt: is told of every row and the fields that are read.

    Raises:
      InputError: the file is empty or malformed, a row lacks one of the texts, its
        messages are not a prompt and one response of the assistant, or its turns do
        not begin and end with a response.
    """

    def read(where: str, row: Row) -> Reading:
        reads = (prompt, response)
        if row.get(response) is None and turns and TURNS in row:
            reads = (prompt, TURNS)
            _check_encodable(where, TURNS, row[TURNS])
            asked = _read_prompt(where, row, prompt, may_be_blank=True)
            by_template = not isinstance(asked, str)
            chat.check_turns(row[TURNS], where=where, by_template=by_template)
            return Reading([row], (*reads, *_read_beside(asked)))
        if row.get(response) is None and "messages" in row:
            reads = ("messages",)
            asked, last_turn = _last_turn(where, row, "messages")
            row = row | {prompt: asked, response: last_turn}
        asked = _read_prompt(where, row, prompt, may_be_blank=True)
        _check_response(where, row, asked, response)
        return Reading([row], (*reads, *_read_beside(asked)))

    return read_rows(source, read, receipt=receipt)


def read_preferences(
    source: str | Path, *, blank: Blank = "keep", receipt: Receipt | None = None
) -> list[Row]:
    """Rows with prompt, chosen and rejected: texts, or messages.

    Rows without a prompt are dialogues as in hh-rlhf: the prompt is what the two sides
    share, up to and including the last "\\n\\nAssistant:" in it. Of messages it is all
    but the last turn.

    Args:
      blank: what becomes of a pair with a response of nothing but white space.
      receipt: is told of every row, the fields that are read, and pairs left out.

    Raises:
      InputError: the file is empty or malformed, a text is missing, the sides are
        equal, or a response is blank (with blank="error"); a prompt is blank, or is
        part of the responses too; two dialogues share no prompt, or go on with other
        turns of the human; or no pair is left.
    """

    def read(where: str, row: Row) -> Reading:
        return preference(where, row, blank=blank)

    pairs = read_rows(source, read, receipt=receipt)
    if not pairs:
        raise InputError(f"{source}: expected a pair of two responses, got empty ones")
    return pairs


def read_rows(
    source: str | Path,
    read: Callable[[str, Row], Reading],
    *,
    text: str | None = None,
    receipt: Receipt | None,
) -> list[Row]:
    """What the rows of a file become.

    Args:
      read: (file and line, row) -> what it becomes.
      text: as of `json_lines.read_located`.
    """
    rows: list[Row] = []
    for where, row in json_lines.read_located(source, text=text, receipt=receipt):
        become, reads, num_texts = read(where, row)
        rows += become
        if receipt is not None:
            receipt.row(where, row, reads=reads, count=num_texts)
            if not become:
                receipt.drop(BLANK, where=where, count=num_texts)
    return rows


def response(where: str, row: Row, *, field: str, blank: Blank) -> Reading:
    """A row with a prompt and a response in a field, as a file has it.

    Raises:
      InputError: a text is missing, or blank (a response with blank="error").
    """
    prompt = _read_prompt(where, row, "prompt")
    _check_response(where, row, prompt, field)
    rows = _unless_blank(where, row, (field,), blank=blank)
    return Reading(rows, ("prompt", field, *_read_beside(prompt)))


def preference(where: str, row: Row, *, blank: Blank) -> Reading:
    """A row with a prompt and two responses, as `read_preferences` has them.

    Raises:
      InputError: a text is missing, malformed or, with blank="error", blank.
    """
    rows = _unless_blank(where, _preference(where, row), SIDES, blank=blank)
    beside = _read_beside(row.get("prompt", row["chosen"]))
    return Reading(rows, ("prompt", *SIDES, *beside))


def _read_beside(prompt: str | list[Any]) -> tuple[str, ...]:
    """Fields that the text contract reads of a row with this prompt beside its texts.

    The chat template, which is asked for messages alone, reads all but the first.
    """
    if isinstance(prompt, str):
        return (chat.CONTROL_TOKENS,)
    return (chat.CONTROL_TOKENS, *chat.OF_TEMPLATE)


def _unless_blank(
    where: str, row: Row, fields: Sequence[str], *, blank: Blank
) -> list[Row]:
    """The row, unless a response is blank and such rows are left out."""
    empty = [field for field in fields if not chat.content(row[field]).strip()]
    if empty and blank == "error":
        raise InputError(
            f"{where}: expected a response in {empty[0]!r}, got an empty text;"
            " remove the pair, or leave out all such pairs by --blank drop (in Python"
            " blank='drop')"
        )
    return [row] if not empty or blank == "keep" else []


def _preference(where: str, row: Row) -> Row:
    chosen, rejected = (_written(where, row, side) for side in SIDES)
    if chosen == rejected:
        raise InputError(
            f"{where}: expected two different responses, got equal 'chosen' and"
            " 'rejected'; remove the pair"
        )
    if "prompt" in row:
        _check_responses(where, row, _read_prompt(where, row, "prompt"))
        return row
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return row | _conversations(where, row)
    # Character by character, which is what is meant here.
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071
    turn = shared.rfind(ASSISTANT)
    if turn < 0:
        raise InputError(
            f"{where}: expected a field 'prompt', or dialogues that share a beginning"
            f" up to {ASSISTANT!r}, got neither; add the field"
        )
    cut = turn + len(ASSISTANT)
    for side in SIDES:
        if HUMAN in row[side][cut:]:
            raise InputError(
                f"{where}: expected dialogues that differ in the last response alone,"
                f" as both follow one prompt, got another turn of the human in {side!r}"
                f" after they part; cut the dialogues there, or remove the pair"
            )
    return row | {
        "prompt": chosen[:cut],
        "chosen": chosen[cut:],
        "rejected": rejected[cut:],
    }


def _conversations(where: str, row: Row) -> Row:
    """Two conversations of messages, cut before their last turns."""
    (prompt, chosen), (other, rejected) = (
        _last_turn(where, row, side) for side in SIDES
    )
    if prompt != other:
        raise InputError(
            f"{where}: expected conversations that differ in their last turn alone, as"
            " both follow one prompt, got others before it; cut them where they part,"
            " or remove the pair"
        )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _last_turn(where: str, row: Row, field: str) -> tuple[list[Any], list[Any]]:
    """(prompt, response) of a whole conversation."""
    messages = _written(where, row, field)
    if isinstance(messages, str):
        raise InputError(
            f"{where}: expected a conversation as messages in {field!r}, got the text"
            f" {messages!r:.40}; give that as messages too, or add the field 'prompt'"
        )
    roles = [message["role"] for message in messages]
    if roles[-1] != chat.ASSISTANT or roles[-2:-1] in ([], [chat.ASSISTANT]):
        raise InputError(
            f"{where}: expected a conversation in {field!r} that ends with a response"
            f" of the assistant to another's turn, got the roles {', '.join(roles)};"
            " cut it after such a response, or remove the row"
        )
    return messages[:-1], messages[-1:]


def _check_responses(where: str, row: Row, prompt: str | list[Any]) -> None:
    """InputError unless the sides are responses to this prompt, and not whole texts."""
    for side in SIDES:
        _check_response(where, row, prompt, side)
    if not isinstance(prompt, str):
        return
    sides = {side: row[side] for side in SIDES}
    if all(text.startswith(prompt) for text in sides.values()):
        raise InputError(
            f"{where}: expected responses without their prompt in 'chosen' and"
            " 'rejected', got both with it in front; cut it off"
        )
    for side, text in sides.items():
        if ASSISTANT in text.partition(HUMAN)[2]:
            raise InputError(
                f"{where}: expected a response to 'prompt' in {side!r}, got a dialogue"
                f" with prompts of its own; leave its last response, or leave out the"
                f" field 'prompt' where both sides share it"
            )


def _read_prompt(
    where: str, row: Row, field: str, *, may_be_blank: bool = False
) -> str | list[Any]:
    """A prompt; of messages, one that waits for the assistant."""
    prompt = _written(where, row, field)
    if not isinstance(prompt, str):
        chat.check_prompt(prompt, where=where, field=field)
    if not (may_be_blank or chat.content(prompt).strip()):
        raise InputError(
            f"{where}: expected a prompt in {field!r}, got an empty text; remove the"
            " row"
        )
    return prompt


def _check_response(where: str, row: Row, prompt: str | list[Any], field: str) -> None:
    """InputError unless it is a response: of messages only to messages."""
    response = _written(where, row, field)
    if isinstance(prompt, str):
        chat.plain(response, where=where, field=field)
    elif not isinstance(response, str):
        chat.check_response(response, where=where, field=field)


def _written(where: str, row: Row, field: str) -> str | list[Any]:
    """A text, or messages."""
    if field not in row:
        raise InputError(
            f"{where}: expected a field {field!r}, got {', '.join(map(repr, row))};"
            " add it, or name the field that holds it"
        )
    value = row[field]
    _check_encodable(where, field, value)
    if isinstance(value, list):
        chat.check_messages(value, where=where, field=field)
    elif not isinstance(value, str):
        raise InputError(
            f"{where}: expected text or messages in {field!r}, got"
            f" {type(value).__name__} {value!r:.40}; make it a text, or a list of"
            ' messages as {"role": "user", "content": "Hi"}'
        )
    return value


def _check_encodable(where: str, field: str, value: Any) -> None:
    """InputError for half a surrogate pair, which neither UTF-8 nor a tokenizer has."""
    if isinstance(value, dict | list):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        for part in inner:
            _check_encodable(where, field, part)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: expected Unicode text in {field!r}, got "
                f"{value[error.start]!r}, half a surrogate pair, at character "
                f"{error.start} of {value!r:.40}; remove it, or write the whole "
                f"character"
            ) from None
