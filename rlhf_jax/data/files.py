"""Reads the rows of files and Hugging Face data sets.

    file ─files─> rows ─encoding─> token lists ─batches─> batches[step]

A row is a dict with all its fields, which a Python reward may read. Prompts and
responses are texts, or messages for a chat template (`text`). A row of a file knows its
line (`json_lines`), so that every later error can name it.
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
from rlhf_jax.functional.errors import InputError, located

Blank = Literal["keep", "drop", "error"]

ASSISTANT = "\n\nAssistant:"  # hh-rlhf: the text before each response
HUMAN = "\n\nHuman:"  # hh-rlhf: the text before each turn of the human
SIDES = ("chosen", "rejected")
BLANK = "a response of nothing but white space"  # why a row is left out
TURNS = "turns"  # field of a demonstration: responses with observations between them


class Reading(NamedTuple):
    """The rows that a row of a file becomes."""

    rows: Sequence[Row]  # empty if the response is blank and such rows are left out
    reads: tuple[str, ...]  # the fields that were read
    num_texts: int = 1  # the number of texts that the receipt counts for the row


def read_prompts(
    source: str | Path,
    *,
    field: str = "prompt",
    beside: str | None = None,
    receipt: Receipt | None = None,
) -> list[Row]:
    """Reads rows with a text or messages in `field`; a .txt file has a prompt per line.

    Args:
      beside: a second field with a prompt, a teacher's.
      receipt: records every row and the fields that are read.

    Raises:
      InputError: the file is empty or malformed, or a row lacks a prompt.
    """
    fields = {field: "--prompt-field"}
    if beside is not None:
        fields |= {beside: "--teacher-field"}

    def read(row: Row) -> Reading:
        prompts = [_read_prompt(row, *named) for named in fields.items()]
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
    """Reads rows with texts or messages in the fields `prompt` and `response`.

    A row may have a whole conversation in `messages` instead, whose last turn is the
    response. With `turns`, a row may have "turns" instead of a response: responses and
    observations alternately, beginning and ending with a response.

    Args:
      receipt: records every row and the fields that are read.

    Raises:
      InputError: the file is empty or malformed, a row lacks one of the texts, its
        messages are not a prompt and one response of the assistant, or its turns do
        not begin and end with a response.
    """

    # `rlhf-jax sft`, which alone reads turns, names the fields.
    options = ("--prompt-field", "--response-field") if turns else ("", "")

    def read(row: Row) -> Reading:
        reads = (prompt, response)
        if row.get(response) is None and turns and TURNS in row:
            reads = (prompt, TURNS)
            _check_encodable(TURNS, row[TURNS])
            asked = _read_prompt(row, prompt, options[0], may_be_blank=True)
            by_template = not isinstance(asked, str)
            chat.check_turns(row[TURNS], by_template=by_template)
            return Reading([row], (*reads, *_read_beside(asked)))
        if row.get(response) is None and "messages" in row:
            reads = ("messages",)
            asked, last_turn = _last_turn(row, "messages")
            row = row | {prompt: asked, response: last_turn}
        asked = _read_prompt(row, prompt, options[0], may_be_blank=True)
        _check_response(row, asked, response, options[1])
        return Reading([row], (*reads, *_read_beside(asked)))

    return read_rows(source, read, receipt=receipt)


def read_preferences(
    source: str | Path, *, blank: Blank = "keep", receipt: Receipt | None = None
) -> list[Row]:
    """Reads rows with prompt, chosen and rejected: texts, or messages.

    Rows without a prompt are dialogues as in hh-rlhf: the prompt is what the two sides
    share, up to and including the last "\\n\\nAssistant:" in it. In conversations of
    messages the prompt is everything before the last turn.

    Args:
      blank: whether a pair with a blank response is kept, left out or an error.
      receipt: records every row, the fields that are read, and pairs left out.

    Raises:
      InputError: the file is empty or malformed; a text is missing; the sides are
        equal; a response is blank (with blank="error"); a prompt is blank, or repeated
        in the responses; two dialogues share no prompt, or differ in a turn of the
        human; or no pair is left.
    """

    def read(row: Row) -> Reading:
        return preference(row, blank=blank)

    pairs = read_rows(source, read, receipt=receipt)
    if not pairs:
        raise InputError(f"{source}: expected a pair of two responses, got empty ones")
    return pairs


def read_rows(
    source: str | Path,
    read: Callable[[Row], Reading],
    *,
    text: str | None = None,
    receipt: Receipt | None,
) -> list[Row]:
    """Reads a file row by row.

    Args:
      read: row -> `Reading`; its errors are prefixed by the row's file and line.
      text: as in `json_lines.read_jsonl`.
    """
    rows: list[Row] = []
    for row in json_lines.read_jsonl(source, text=text, receipt=receipt):
        with located(row.where):
            become, reads, num_texts = read(row)
        rows += become
        if receipt is not None:
            receipt.row(row.where, row, reads=reads, count=num_texts)
            if not become:
                receipt.drop(BLANK, where=row.where, count=num_texts)
    return rows


def response(row: Row, *, field: str, blank: Blank) -> Reading:
    """Checks a row with a prompt and a response in `field`.

    Raises:
      InputError: a text is missing, or blank (a response with blank="error").
    """
    prompt = _read_prompt(row, "prompt")
    _check_response(row, prompt, field)
    rows = _unless_blank(row, (field,), blank=blank)
    return Reading(rows, ("prompt", field, *_read_beside(prompt)))


def preference(row: Row, *, blank: Blank) -> Reading:
    """Checks a row with a prompt and two responses, as in `read_preferences`.

    Raises:
      InputError: a text is missing, malformed or, with blank="error", blank.
    """
    rows = _unless_blank(_preference(row), SIDES, blank=blank)
    beside = _read_beside(row.get("prompt", row["chosen"]))
    return Reading(rows, ("prompt", *SIDES, *beside))


def _read_beside(prompt: str | list[Any]) -> tuple[str, ...]:
    """Names the fields of a row that the text contract reads besides its texts.

    All but the first are for the chat template, which only renders messages.
    """
    if isinstance(prompt, str):
        return (chat.CONTROL_TOKENS,)
    return (chat.CONTROL_TOKENS, *chat.OF_TEMPLATE)


def _unless_blank(row: Row, fields: Sequence[str], *, blank: Blank) -> list[Row]:
    """Returns [row], or [] if a response is blank and blank="drop"."""
    empty = [field for field in fields if not chat.content(row[field]).strip()]
    if empty and blank == "error":
        raise InputError(
            f"expected a response in {empty[0]!r}, got an empty text; remove the pair, "
            "or leave out all such pairs by --blank drop (in Python blank='drop')"
        )
    return [row] if not empty or blank == "keep" else []


def _preference(row: Row) -> Row:
    chosen, rejected = (_written(row, side) for side in SIDES)
    if chosen == rejected:
        raise InputError(
            "expected two different responses, got equal 'chosen' and"
            " 'rejected'; remove the pair"
        )
    if "prompt" in row:
        _check_responses(row, _read_prompt(row, "prompt"))
        return row
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return row | _conversations(row)
    # A prefix of characters, not of paths, is what is needed here.
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071
    turn = shared.rfind(ASSISTANT)
    if turn < 0:
        raise InputError(
            f"expected a field 'prompt', or dialogues that share a beginning"
            f" up to {ASSISTANT!r}, got neither; add the field"
        )
    cut = turn + len(ASSISTANT)
    for side in SIDES:
        if HUMAN in row[side][cut:]:
            raise InputError(
                f"expected dialogues that differ in the last response alone,"
                f" as both follow one prompt, got another turn of the human in {side!r}"
                f" after they part; cut the dialogues there, or remove the pair"
            )
    return row | {
        "prompt": chosen[:cut],
        "chosen": chosen[cut:],
        "rejected": rejected[cut:],
    }


def _conversations(row: Row) -> Row:
    (prompt, chosen), (other, rejected) = (_last_turn(row, side) for side in SIDES)
    if prompt != other:
        raise InputError(
            "expected conversations that differ in their last turn alone, as"
            " both follow one prompt, got others before it; cut them where they part,"
            " or remove the pair"
        )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _last_turn(row: Row, field: str) -> tuple[list[Any], list[Any]]:
    """Splits a whole conversation into (prompt, response)."""
    messages = _written(row, field)
    if isinstance(messages, str):
        raise InputError(
            f"expected a conversation as messages in {field!r}, got the text"
            f" {messages!r:.40}; give that as messages too, or add the field 'prompt'"
        )
    roles = [message["role"] for message in messages]
    if roles[-1] != chat.ASSISTANT or roles[-2:-1] in ([], [chat.ASSISTANT]):
        raise InputError(
            f"expected a conversation in {field!r} that ends with a response"
            f" of the assistant to another's turn, got the roles {', '.join(roles)};"
            " cut it after such a response, or remove the row"
        )
    return messages[:-1], messages[-1:]


def _check_responses(row: Row, prompt: str | list[Any]) -> None:
    """Raises InputError unless both sides are responses without their prompt."""
    for side in SIDES:
        _check_response(row, prompt, side)
    if not isinstance(prompt, str):
        return
    sides = {side: row[side] for side in SIDES}
    if all(text.startswith(prompt) for text in sides.values()):
        raise InputError(
            "expected responses without their prompt in 'chosen' and"
            " 'rejected', got both with it in front; cut it off"
        )
    for side, text in sides.items():
        if ASSISTANT in text.partition(HUMAN)[2]:
            raise InputError(
                f"expected a response to 'prompt' in {side!r}, got a dialogue"
                f" with prompts of its own; leave its last response, or leave out the"
                f" field 'prompt' where both sides share it"
            )


def _read_prompt(
    row: Row, field: str, option: str = "", *, may_be_blank: bool = False
) -> str | list[Any]:
    """Reads a prompt; InputError if it is blank or ends with the assistant's turn."""
    prompt = _written(row, field, option)
    if not isinstance(prompt, str):
        chat.check_prompt(prompt, field=field)
    if not (may_be_blank or chat.content(prompt).strip()):
        raise InputError(
            f"expected a prompt in {field!r}, got an empty text; remove the row"
        )
    return prompt


def _check_response(
    row: Row, prompt: str | list[Any], field: str, option: str = ""
) -> None:
    """Raises InputError unless the field has a response; messages answer messages."""
    response = _written(row, field, option)
    if isinstance(prompt, str):
        chat.plain(response, field=field)
    elif not isinstance(response, str):
        chat.check_response(response, field=field)


def _written(row: Row, field: str, option: str = "") -> str | list[Any]:
    """Reads a text or messages; InputError for anything else.

    `option` names the field, for the error; "" where none does.
    """
    if field not in row:
        how = (
            f"name the field that holds it by {option}" if option else "rename a field"
        )
        raise InputError(
            f"expected a field {field!r}, got {', '.join(map(repr, row))};"
            f" add it, or {how}"
        )
    value = row[field]
    _check_encodable(field, value)
    if isinstance(value, list):
        chat.check_messages(value, field=field)
    elif not isinstance(value, str):
        raise InputError(
            f"expected text or messages in {field!r}, got"
            f" {type(value).__name__} {value!r:.40}; make it a text, or a list of"
            ' messages as {"role": "user", "content": "Hi"}'
        )
    return value


def _check_encodable(field: str, value: Any) -> None:
    """Raises InputError for a lone surrogate, which UTF-8 cannot encode."""
    if isinstance(value, dict | list):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        for part in inner:
            _check_encodable(field, part)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"expected Unicode text in {field!r}, got {value[error.start]!r}, half "
                f"a surrogate pair, at character {error.start} of {value!r:.40}; remove"
                " it, or write the whole character"
            ) from None
