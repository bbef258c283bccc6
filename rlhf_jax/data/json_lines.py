"""Rows of a JSON Lines file, a text or a Hugging Face data set, with their places."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Self

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import progress

Row = dict[str, Any]
MAX_DEPTH = 100  # of JSON within JSON; json itself fails at a depth of its caller's


class LocatedRow(Row):
    """A row with its file and line; a copy, or what another process gets, is a dict."""

    def __init__(self, fields: Row, *, where: str) -> None:
        super().__init__(fields)
        self.where = where

    def __or__(self, other: Any) -> Self:  # of any keys, as the row itself
        """The row with other fields, from the same line."""
        return type(self)(dict(self) | other, where=self.where)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def place(row: Row, index: int) -> str:
    """Where a row stands, for errors: its file and line, or else its number."""
    return row.where if isinstance(row, LocatedRow) else f"row {index} (from 0)"


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
      InputError: names the file and line that cannot be read.
    """
    if str(source).startswith("hf:"):
        return _hub_rows(str(source))
    located = []
    written = lines(Path(source))
    for where, line in progress.track(written, f"{source}: read", total=len(written)):
        row = _json(where, line)
        if not isinstance(row, dict):
            raise InputError(
                f"{where}: expected a JSON object, got {type(row).__name__}"
                f" {line[:40]!r}"
            )
        located.append((where, LocatedRow(row, where=where)))
    return located


def read_text(path: str | Path) -> str:
    """The whole of a plain text file; InputError if it is empty."""
    text = _read(Path(path))
    if not text.strip():
        raise InputError(f"{path}: expected text, got an empty file")
    return text


def _json(where: str, line: str) -> Any:
    """The value of a line of JSON Lines."""
    got = f"{where}: expected one JSON object per line, got {line[:40]!r}"
    try:
        value = json.loads(line)
        if not _deeper_than(MAX_DEPTH, value):
            return value
    except json.JSONDecodeError as error:
        raise InputError(f"{got} ({error.msg}, column {error.colno})") from None
    except RecursionError:
        pass
    except ValueError as error:  # an integer of more digits than Python reads
        raise InputError(f"{got} ({str(error).partition(';')[0]})") from None
    raise InputError(
        f"{got}, nested deeper than {MAX_DEPTH} objects or lists; flatten it, or"
        " remove the row"
    )


def _deeper_than(depth: int, value: Any) -> bool:
    """Whether lists and objects are nested deeper; without recursion."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(inner, dict | list) for inner in level)


def lines(path: Path) -> list[tuple[str, str]]:
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
    """The text, without the byte order mark that some editors begin a file with."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            f"{path!s:.200}: expected a readable file, got {error.strerror}; check the"
            " path"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8 text, got byte 0x{error.object[error.start]:02x}"
            f" at offset {error.start}; convert the file"
        ) from None
    except ValueError as error:  # a path with a NUL
        raise InputError(
            f"{str(path)!r:.200}: expected the path of a file, got one with an"
            f" {error}; check the path"
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
    places = (f"{source}[{i}]" for i in range(len(table)))
    rows = progress.track(table, f"{source}: read", total=len(table))
    return [
        (where, LocatedRow(dict(row), where=where))
        for where, row in zip(places, rows, strict=True)
    ]
