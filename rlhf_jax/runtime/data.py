"""Files and Hugging Face data sets to rows.

    file ─data─> rows ─encoding─> token lists ─batches─> batches[step]

A row is a dict that keeps all its fields: a Python reward is given the rows.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from rlhf_jax.functional.checks import InputError

Row = dict[str, Any]
Item = TypeVar("Item")

Blank = Literal["keep", "drop", "error"]

ASSISTANT = "\n\nAssistant:"  # hh-rlhf: what stands before each answer
HUMAN = "\n\nHuman:"  # and before each turn of the other side


def read_jsonl(source: str | Path) -> list[Row]:
    """JSON objects, one a line, or the rows of a Hugging Face data set.

    Args:
      source: a file, or `hf:NAME` or `hf:NAME:SPLIT` (extra `datasets`; SPLIT is
        train unless given).

    Raises:
      InputError: names the file and line that cannot be read.
    """
    return [row for _, row in read_located(source)]


def read_located(source: str | Path) -> list[tuple[str, Row]]:
    """(where it stands, row) of `read_jsonl`, so that a message can name the place.

    Raises:
      InputError: as `read_jsonl`.
    """
    if str(source).startswith("hf:"):
        return _hub_rows(str(source))
    located = []
    for where, line in _lines(Path(source)):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where}: expected one JSON object a line, got {line[:40]!r}"
                f" ({error.msg}, column {error.colno})"
            ) from None
        if not isinstance(row, dict):
            raise InputError(
                f"{where}: expected a JSON object, got {type(row).__name__}"
                f" {line[:40]!r}"
            )
        located.append((where, row))
    return located


def read_prompts(source: str | Path, *, field: str = "prompt") -> list[Row]:
    """Rows with a text in `field`; a .txt file has one prompt a line.

    Raises:
      InputError: the file is empty or malformed, or a row has no text in `field`.
    """
    if str(source).endswith(".txt"):
        located = [(where, {field: line}) for where, line in _lines(Path(source))]
    else:
        located = read_located(source)
    for where, row in located:
        if not _text(where, row, field).strip():
            raise InputError(
                f"{where}: expected a prompt in {field!r}, got an empty text; remove"
                " the row"
            )
    return [row for _, row in located]


def read_demonstrations(
    source: str | Path, *, prompt: str = "prompt", response: str = "response"
) -> list[Row]:
    """Rows with texts in the fields named by `prompt` and `response`.

    Raises:
      InputError: the file is empty or malformed, or a row lacks one of the texts.
    """
    located = read_located(source)
    for where, row in located:
        _text(where, row, prompt)
        _text(where, row, response)
    return [row for _, row in located]


def read_preferences(source: str | Path, *, blank: Blank = "keep") -> list[Row]:
    """Rows with the texts prompt, chosen and rejected.

    Rows without a prompt are dialogues as in hh-rlhf: the prompt is what the two sides
    share, up to and including the last "\\n\\nAssistant:" in it.

    Args:
      blank: what becomes of a pair with an answer of nothing but white space.

    Raises:
      InputError: the file is empty or malformed, a text is missing, the sides are
        equal, or an answer is blank (with blank="error"); a prompt is blank, or stands
        in the answers too; two dialogues share no prompt, or go on with other turns of
        the human; or no pair is left.
    """
    pairs = []
    for where, row in read_located(source):
        pair = _preference(where, row)
        empty = [side for side in ("chosen", "rejected") if not pair[side].strip()]
        if empty and blank == "error":
            raise InputError(
                f"{where}: expected an answer in {empty[0]!r}, got an empty text;"
                " remove the pair, or leave out all such pairs with blank='drop'"
            )
        if not empty or blank == "keep":
            pairs.append(pair)
    if not pairs:
        raise InputError(f"{source}: expected a pair of two answers, got empty ones")
    return pairs


def read_text(path: str | Path) -> str:
    """The whole of a plain text file; InputError if it is empty."""
    text = _read(Path(path))
    if not text.strip():
        raise InputError(f"{path}: expected text, got an empty file")
    return text


def hold_out(
    rows: Sequence[Item], *, share: float, seed: int
) -> tuple[list[Item], list[Item]]:
    """(rows to train on, rows held out), each in the order of `rows`.

    Args:
      share: of the rows, drawn at random, to hold out; at least one row unless it is 0.

    Raises:
      InputError: share is not in [0, 1), or no row is left to train on.
    """
    if not 0 <= share < 1:
        raise InputError(f"expected a share to hold out in [0, 1), got {share}")
    count = max(round(share * len(rows)), 1) if share else 0
    if count >= len(rows):
        raise InputError(
            f"expected rows to train on beside {count} held out, got {len(rows)} in "
            "all; hold out a smaller share or none, or give more rows"
        )
    held = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    kept = [row for i, row in enumerate(rows) if i not in held]
    return kept, [row for i, row in enumerate(rows) if i in held]


def _preference(where: str, row: Row) -> Row:
    chosen, rejected = _text(where, row, "chosen"), _text(where, row, "rejected")
    if chosen == rejected:
        raise InputError(
            f"{where}: expected two different answers, got equal 'chosen' and"
            " 'rejected'; remove the pair"
        )
    if "prompt" in row:
        _answers_of(where, row, _text(where, row, "prompt"))
        return row
    # Character by character, which is what is meant here.
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071
    turn = shared.rfind(ASSISTANT)
    if turn < 0:
        raise InputError(
            f"{where}: expected a field 'prompt', or dialogues that share a beginning"
            f" up to {ASSISTANT!r}, got neither; add the field"
        )
    cut = turn + len(ASSISTANT)
    for side in ("chosen", "rejected"):
        if HUMAN in row[side][cut:]:
            raise InputError(
                f"{where}: expected dialogues that differ in the last answer alone, as"
                f" both answer one prompt, got another turn of the human in {side!r}"
                f" after they part; cut the dialogues there, or remove the pair"
            )
    return row | {
        "prompt": chosen[:cut],
        "chosen": chosen[cut:],
        "rejected": rejected[cut:],
    }


def _answers_of(where: str, row: Row, prompt: str) -> None:
    """InputError unless the sides are answers to this prompt, and not whole texts."""
    if not prompt.strip():
        raise InputError(
            f"{where}: expected a prompt in 'prompt', got an empty text; remove the"
            " pair"
        )
    sides = {side: row[side] for side in ("chosen", "rejected")}
    if all(text.startswith(prompt) for text in sides.values()):
        raise InputError(
            f"{where}: expected answers without their prompt in 'chosen' and"
            " 'rejected', got both with it in front; cut it off"
        )
    for side, text in sides.items():
        if ASSISTANT in text.partition(HUMAN)[2]:
            raise InputError(
                f"{where}: expected an answer to 'prompt' in {side!r}, got a dialogue"
                f" with prompts of its own; leave its last answer, or leave out the"
                f" field 'prompt' where both sides share it"
            )


def _text(where: str, row: Row, field: str) -> str:
    if field not in row:
        raise InputError(
            f"{where}: expected a field {field!r}, got {', '.join(map(repr, row))};"
            " add it, or name the field that holds it"
        )
    if not isinstance(row[field], str):
        raise InputError(
            f"{where}: expected text in {field!r}, got {type(row[field]).__name__}"
            f" {row[field]!r:.40}"
        )
    return row[field]


def _lines(path: Path) -> list[tuple[str, str]]:
    """The lines that are not blank; only "\\n" ends one, as JSON Lines has it."""
    lines = [
        (f"{path}:{number}", line)
        for number, line in enumerate(_read(path).split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise InputError(f"{path}: expected at least one row, got an empty file")
    return lines


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path}: expected a readable file, got {error.strerror}; check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8 text, got byte 0x{error.object[error.start]:02x}"
            f" at offset {error.start}; convert the file"
        ) from None


def _hub_rows(source: str) -> list[tuple[str, Row]]:
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise InputError(
            f"{source}: a Hugging Face data set needs the package datasets; run"
            " `pip install 'rlhf-jax[datasets]'`"
        ) from None
    try:
        table = datasets.load_dataset(name, split=split if split else "train")
    except (OSError, ValueError) as error:  # what datasets raises derives from these
        raise InputError(
            f"{source}: expected a Hugging Face data set as hf:NAME or hf:NAME:SPLIT,"
            f" got: {error}"
        ) from error
    if len(table) == 0:
        raise InputError(f"{source}: expected at least one row, got none")
    return [(f"{source}[{i}]", dict(row)) for i, row in enumerate(table)]
