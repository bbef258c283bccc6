"""Records for every row of a source whether it is used, for what, or why not.

Readers record each row in a `Receipt`, and code that leaves a row out records why. A
row that is lost without a record is an error:

    rows read = rows used + rows left out
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.receipts.items import Decode, Item, Part, shared_prompts

Use = Literal["training", "held out", "watched", "evaluated", "normalised on"]


@dataclasses.dataclass
class Tally:
    """Counts how often something happened, and keeps the first row concerned."""

    count: int = 0
    first: str | None = None  # file and line
    order: int | None = None  # index of that row among the rows read

    def add(self, count: int, *, where: str | None, order: int | None) -> None:
        """Counts a row; `first` is the row that is earliest in the file."""
        self.count += count
        if self.first is None or (
            order is not None and self.order is not None and order < self.order
        ):
            self.first, self.order = where, order


class Receipt:
    """The record of the rows of one source.

    A row counts once, except that KTO counts a pair as two texts.
    """

    def __init__(self, name: str, source: str, *, called: str = "rows") -> None:
        """Starts an empty receipt.

        Args:
          name: the option that names the source.
          source: the value of that option.
          called: what the receipt calls the rows.
        """
        self.name, self.source, self.called = name, source, called
        self.read = 0
        self.parts: dict[Use, Part] = {}
        self._rows: dict[str, int] = {}  # count by file and line, in file order
        self._order: dict[str, int] = {}
        self._read_fields: dict[str, None] = {}
        self._readers: list[str] = []
        self._unread: dict[str, Tally] = {}
        self._left_out: dict[str, Tally] = {}
        self._cut: dict[str, Tally] = {}
        self._notes: dict[str, Tally] = {}

    def row(
        self,
        where: str,
        row: Mapping[str, Any],
        *,
        reads: Iterable[str] = (),
        count: int = 1,
    ) -> None:
        """Records a row that was read.

        Args:
          where: its file and line.
          row: all its fields; fields that are None are ignored.
          reads: the fields that are read.
          count: number of texts, 2 for a pair that is read as two.
        """
        self.read += count
        self._order.setdefault(where, len(self._order))
        self._rows[where] = self._rows.get(where, 0) + count
        fields = tuple(reads)
        for field, value in row.items():
            if value is None:
                continue
            if field in fields:
                self._read_fields.setdefault(field)
            else:
                self._add(self._unread, field, where=where)

    def rows_of(self, other: Receipt) -> None:
        """Records the remaining rows of another receipt, which have a second use."""
        for where in other.places:
            self.row(where, {})

    def reads(self, *fields: str) -> None:
        """Records fields that are read from every row that has them."""
        for field in fields:
            if self._unread.pop(field, None) is not None:
                self._read_fields.setdefault(field)

    def gives(self, to: str) -> None:
        """Records that user code gets whole rows and may read every field."""
        self._readers.append(to)

    def drop(self, reason: str, *, where: str, count: int = 1) -> None:
        """Records that a row is left out.

        Args:
          reason: why; the same text for all rows with this reason.
          where: its file and line, as in `row`.
          count: as in `row`.
        """
        left = self._rows.get(where, 0) - count
        assert left >= 0, f"{where} is left out twice, or was never read"
        self._rows[where] = left
        self._add(self._left_out, reason, where=where, count=count)

    def keep(self, count: int, *, reason: str) -> None:
        """Records that all rows after the first `count` are left out."""
        for where in self.places[count:]:
            self.drop(reason, where=where)

    def cut(self, reason: str, *, count: int = 1) -> None:
        """Records that a text is shortened."""
        self._add(self._cut, reason, where=None, count=count)

    def note(self, reason: str, *, where: str | None = None, count: int = 1) -> None:
        """Records a remark about a row, for the author of the data."""
        self._add(self._notes, reason, where=where, count=count)

    def text(self, blocks: int, *, size: int) -> None:
        """Records plain text that is cut into blocks of `size` tokens."""
        self.called = "blocks of text"
        for number in range(1, blocks + 1):
            self.row(f"{self.source}, block {number}", {})
        if blocks > 1:
            self.cut(f"one text cut into blocks of at most {size} tokens", count=blocks)

    def use(self, use: Use, items: Sequence[Item]) -> None:
        """Records a use of rows, with their items (`items.of_texts` and others)."""
        self.parts[use] = Part(items)

    @property
    def places(self) -> list[str]:
        """The file and line of each remaining row, in the order of the file."""
        return [where for where, count in self._rows.items() for _ in range(count)]

    def to_json(self) -> dict[str, Any]:
        """Returns the receipt without its example, for data.json.

        Raises:
          AssertionError: rows read differ from rows used plus rows left out.
        """
        used = sum(part.rows for part in self.parts.values())
        left_out = sum(tally.count for tally in self._left_out.values())
        assert self.read == used + left_out, (
            f"{self.name} {self.source}: {self.read} {self.called} were read, "
            f"{used} are used and {left_out} were told to be left out"
        )
        return {
            "name": self.name,
            "source": self.source,
            "called": self.called,
            "read": self.read,
            "used": used,
            "left_out": _json(self._left_out),
            "fields": {
                "read": list(self._read_fields),
                "whole_rows_given_to": self._readers,
                "unread": {} if self._readers else _json(self._unread),
            },
            "cut": _json(self._cut),
            "notes": _json(self._notes),
            "uses": {use: part.to_json() for use, part in self.parts.items()},
        }

    def example(self, *, decode: Decode) -> list[dict[str, Any]]:
        """Returns the first row of the first use, in pieces that are learned or not."""
        parts = [part for part in self.parts.values() if part.rows]
        return parts[0].example(decode=decode) if parts else []

    def _add(
        self,
        of: dict[str, Tally],
        reason: str,
        *,
        where: str | None,
        count: int = 1,
    ) -> None:
        order = None if where is None else self._order.get(where)
        of.setdefault(reason, Tally()).add(count, where=where, order=order)


class Receipts:
    """The receipts of all sources of a run."""

    def __init__(self) -> None:
        """Starts without a source."""
        self._sources: list[Receipt] = []

    def source(self, name: str, source: str, *, called: str = "rows") -> Receipt:
        """Adds the receipt of another source; arguments as for `Receipt`."""
        receipt = Receipt(name, source, called=called)
        self._sources.append(receipt)
        return receipt

    def to_json(self, *, decode: Decode, unprompted: Tokens = ()) -> dict[str, Any]:
        """Returns the content of data.json.

        Args:
          decode: token ids -> text, with special tokens.
          unprompted: tokens of a prompt without text, such as BOS, which do not count
            as a shared prompt.
        """
        training = [
            source.parts["training"]
            for source in self._sources
            if "training" in source.parts
        ]
        return {
            "sources": [
                source.to_json() | {"example": source.example(decode=decode)}
                for source in self._sources
            ],
            "prompts_shared_with_training": {
                f"{source.name}, {use}": {
                    "shared": shared_prompts(training, part, unprompted=unprompted),
                    "rows": part.rows,
                }
                for source in self._sources
                for use, part in source.parts.items()
                if use in ("held out", "watched") and training and part.rows
            },
        }


def _json(of: dict[str, Tally]) -> dict[str, Any]:
    return {
        reason: {"count": tally.count, "first": tally.first}
        for reason, tally in of.items()
    }
