"""Reads the rows of JSON Lines, plain text and `tables`' formats, with their lines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlhf_jax.data import formats
from rlhf_jax.data.formats import Format, NoFile
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.functional import errors
from rlhf_jax.functional.errors import InputError
from rlhf_jax.runs import parsing, progress
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.parsing import Source

if TYPE_CHECKING:
    from rlhf_jax.data.tables import Located

Row = dict[str, Any]


class LocatedRow(Row):
    """A row with its file and line; copies, and pickled rows, are plain dicts."""

    def __init__(self, fields: Row, *, where: str) -> None:
        super().__init__(fields)
        self.where = where

    def __or__(self, other: Any) -> Self:  # of any keys, as the row itself
        """Returns the row with other fields, from the same line."""
        return type(self)(dict(self) | other, where=self.where)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def place(row: Row, index: int) -> str:
    """Returns a row's file and line for errors, or else its number."""
    return row.where if isinstance(row, LocatedRow) else f"row {index} (from 0)"


def read_jsonl(
    source: str | Path, *, text: str | None = None, receipt: Receipt | None = None
) -> list[LocatedRow]:
    """Reads JSON objects, one per line, or the rows of another format or a data set.

    Args:
      source: a file or its address (`urls.of`), or `hf:NAME` or `hf:NAME:SPLIT` (the
        default SPLIT is train). A data set, Parquet and Arrow need the extra
        `datasets`.
      text: the field that gets a line of a .txt file; None reads no such files.
      receipt: notes blank lines, and names the option of a missing file. The caller
        records the rows.

    Raises:
      InputError: a line or the format cannot be read, or there is no row; names the
        file and line.
    """
    with _naming(receipt):
        rows = _located(source, text=text, receipt=receipt)
    located = [LocatedRow(row, where=where) for where, row in rows]
    if not located:
        raise InputError(
            f"{source}: expected at least one row, got none; is the file empty?"
        )
    return located


def _naming(receipt: Receipt | None) -> contextlib.AbstractContextManager[None]:
    """Names the option of a file that is missing."""
    if receipt is None:
        return contextlib.nullcontext()
    return errors.located(receipt.name, NoFile)


def _located(
    source: str | Path, *, text: str | None, receipt: Receipt | None
) -> Iterable[tuple[str, Row]]:
    if str(source).startswith("hf:"):
        # Imported late, here and below: JSON Lines need no library of tables.
        from rlhf_jax.data import tables

        return tables.of_hub(str(source))
    if text is not None and formats.is_text(source):
        path = urls.fetched(source)
        lines = _lines(path, _text(path), receipt=receipt)
        return [(where, {text: line}) for where, line in lines]
    return _rows(urls.fetched(source), receipt=receipt)


def read_text(path: str | Path, *, receipt: Receipt | None = None) -> str:
    """Reads a plain text file, compressed or not; InputError if it is empty.

    Args:
      receipt: names the option of a missing file.
    """
    with _naming(receipt):
        text = _text(urls.fetched(path))
    if not text.strip():
        raise InputError(f"{path}: expected text, got an empty file")
    return text


def _rows(
    path: Path, *, receipt: Receipt | None
) -> Iterator[tuple[str, Row]] | Located:
    form, data = _read(path)
    if data is None:
        assert form is not None
        from rlhf_jax.data import tables

        return tables.of_table(path, form)
    if form not in (None, *formats.WRITTEN):  # within another format
        raise form.refusal(path)
    text = _decoded(path, data)
    if form is None:
        lines = _lines(path, text, receipt=receipt)
        tracked = progress.track(lines, f"{path}: read", total=len(lines))
        return _objects((where, _value(where, line)) for where, line in tracked)
    if form is formats.ARRAY:
        source = Source(str(path), "a JSON array", "correct it")
        depth = parsing.MAX_DEPTH + 1
        values = parsing.of_json(text, source, depth=depth, size=None, foreign=True)
        return _objects((f"{path}[{n}]", value) for n, value in enumerate(values))
    from rlhf_jax.data import tables

    return tables.of_csv(path, text, form)


def _objects(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Row]]:
    for where, value in values:
        if not isinstance(value, dict):
            shown = json.dumps(value, ensure_ascii=False)
            raise InputError(
                f"{where}: expected a JSON object, got {type(value).__name__}"
                f" {shown[:40]!r}"
            )
        yield where, value


def _value(where: str, line: str) -> Any:
    source = Source(where, "one JSON object per line", "correct or remove it")
    return parsing.of_json(line, source, foreign=True)


def _lines(path: Path, text: str, *, receipt: Receipt | None) -> list[tuple[str, str]]:
    """Returns the lines that are not blank; only "\\n" ends one, as in JSON Lines."""
    lines = []
    # There is no line after the last "\n".
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if line.strip():
            lines.append((f"{path}:{number}", line))
        elif receipt is not None:
            receipt.note("a blank line, which is no row", where=f"{path}:{number}")
    return lines


def _text(path: Path) -> str:
    """Reads a file that must be plain text, compressed or not, whatever its name."""
    form, data = _read(path, named=False)
    if form is not None:
        raise form.refusal(path, expected="text")
    assert data is not None
    return _decoded(path, data)


def _decoded(path: Path, data: bytes) -> str:
    return parsing.decoded(data, Source(str(path), "UTF-8 text", "convert the file"))


def _read(path: Path, *, named: bool = True) -> tuple[Format | None, bytes | None]:
    """Returns the format of a file's content, and the content, unpacked.

    The content of a table is None, as `datasets` reads the file.

    Args:
      named: whether the format follows from the name where the bytes do not tell it,
        and an array of objects is one of rows.
    """

    def detect(path: Path, head: bytes) -> Format | None:
        return formats.of(path, head) if named else formats.of_bytes(head)

    try:
        with path.open("rb") as file:  # opened once: it may be a pipe
            head = file.read(formats.HEAD)
            form = detect(path, head)
            if form is not None and form.builder is not None:
                return form, None
            data = head + file.read()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        seen = "" if path.is_absolute() else f", seen from {Path.cwd()}"
        raise NoFile(
            f"{parsing.shown(path)}: expected a readable file, got"
            f" {getattr(error, 'strerror', error)}{seen}; check the path"
        ) from None
    if form is not None and form.unpack is not None:
        data = form.unpacked(path, data)
        form = detect(formats.unpacked_name(path), data[: formats.HEAD])
    return form, data
