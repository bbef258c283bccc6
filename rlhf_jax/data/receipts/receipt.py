"""What became of every row of a source: read, left out and why, used for what.

Readers tell a `Receipt` each row that they read, and whoever leaves one out tells it
why. It knows how many are left, so that a row that vanished without a word is an error:

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
    """How often something happened, and to which row first."""

    count: int = 0
    first: str | None = None  # file and line
    order: int | None = None  # of that row among those read

    def add(self, count: int, *, where: str | None, order: int | None) -> None:
        """One row more, of which the earliest in the file is kept."""
        self.count += count
        if self.first is None or (
            order is not None and self.order is not None and order < self.order
        ):
            self.first, self.order = where, order


class Receipt:
    """What became of the rows of one source.

    A row counts once, but for the pairs that KTO reads as two texts.
    """

    def __init__(self, name: str, source: str, *, called: str = "rows") -> None:
        """Nothing is read yet.

        Args:
          name: the option that names the source.
          source: its value.
          called: what its rows are.
        """
        self.name, self.source, self.called = name, source, called
        self.read = 0
        self.parts: dict[Use, Part] = {}
        self._rows: dict[str, int] = {}  # by file and line, in the order of the file
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
        """A row was read.

        Args:
          where: its file and line.
          row: with all its fields, of which those without a value are not counted.
          reads: fields that are read of it.
          count: what it counts for, as 2 where a pair is read as two texts.
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
        """The rows that are left of another receipt have a second use."""
        for where in other.places:
            self.row(where, {})

    def reads(self, *fields: str) -> None:
        """Fields that are read of every row that has them."""
        for field in fields:
            if self._unread.pop(field, None) is not None:
                self._read_fields.setdefault(field)

    def gives(self, to: str) -> None:
        """Whole rows are given to a user's own code, which may read every field."""
        self._readers.append(to)

    def drop(self, reason: str, *, where: str, count: int = 1) -> None:
        """A row is left out.

        Args:
          reason: the same text for all rows with this reason.
          where: its file and line, as `row` was told.
          count: as in `row`.
        """
        left = self._rows.get(where, 0) - count
        assert left >= 0, f"{where} is left out twice, or was never read"
        self._rows[where] = left
        self._add(self._left_out, reason, where=where, count=count)

    def keep(self, count: int, *, reason: str) -> None:
        """All rows but the first ones are left out."""
        for where in self.places[count:]:
            self.drop(reason, where=where)

    def cut(self, reason: str, *, count: int = 1) -> None:
        """A text is made shorter than it was written."""
        self._add(self._cut, reason, where=None, count=count)

    def note(self, reason: str, *, where: str | None = None, count: int = 1) -> None:
        """Something of a row that its author should know."""
        self._add(self._notes, reason, where=where, count=count)

    def text(self, blocks: int, *, size: int) -> None:
        """Plain text was read, and cut into blocks of `size` tokens."""
        self.called = "blocks of text"
        for number in range(1, blocks + 1):
            self.row(f"{self.source}, block {number}", {})
        if blocks > 1:
            self.cut(f"one text cut into blocks of at most {size} tokens", count=blocks)

    def use(self, use: Use, items: Sequence[Item]) -> None:
        """What rows have become that have this use: `items.of_texts` and others."""
        self.parts[use] = Part(items)

    @property
    def places(self) -> list[str]:
        """File and line of each row that is left, in the order of the file."""
        return [where for where, count in self._rows.items() for _ in range(count)]

    def to_json(self) -> dict[str, Any]:
        """All of it but the example.

        Raises:
          AssertionError: a row that is left has no use, or one that is used was not
            read: somebody left rows out, or used them twice, without telling.
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
        """The first row of the first use, in pieces that are learned or not."""
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
        """There is no source yet."""
        self._sources: list[Receipt] = []

    def source(self, name: str, source: str, *, called: str = "rows") -> Receipt:
        """The receipt of another source; arguments as those of `Receipt`."""
        receipt = Receipt(name, source, called=called)
        self._sources.append(receipt)
        return receipt

    def to_json(self, *, decode: Decode, unprompted: Tokens = ()) -> dict[str, Any]:
        """What data.json holds.

        Args:
          decode: token ids to text, special tokens kept.
          unprompted: tokens of a prompt without text, such as BOS, which rows do not
            share.
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
