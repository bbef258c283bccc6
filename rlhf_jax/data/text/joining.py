"""Texts in pieces to tokens, and what a text's tokens are behind another text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data import tokenization
from rlhf_jax.data.text.control import Control

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = ("a", "0", "x", ".", "\n", "the")  # texts that most tokenizers have tokens for
ANCHORS = ("\n", ".", "a", "0", " ")  # what a text in the middle may follow
CONTEXT = 8  # tokens before a text: more than any character is made of


class OutOfRoom(Exception):
    """A text has more tokens than there is room for; the others are not encoded."""


class Joining:
    """The tokens of texts that begin, or that follow others, of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, control: Control) -> None:
        """Of a tokenizer and its control tokens."""
        self._tokenizer, self._control = tokenizer, control

    @functools.cached_property
    def prefix(self) -> list[int]:
        """What the tokenizer puts in front of a text, as BOS."""
        for probe in itertools.chain(PROBES, self._own_texts()):
            try:
                (plain,) = tokenization.encode(self._tokenizer, [probe], special=False)
                (whole,) = tokenization.encode(self._tokenizer, [probe], special=True)
            except Exception:  # no token for this one: tokenizers raises bare Exception
                continue
            for at in range(len(whole) - len(plain) + 1):
                if plain and whole[at : at + len(plain)] == plain:
                    return whole[:at]
        return []

    def _own_texts(self) -> Iterator[str]:
        """Of a few of the tokenizer's tokens, which need not have any of PROBES."""
        ids = sorted(set(self._tokenizer.get_vocab().values()) - self._control.ids)
        for number in ids[:4]:
            yield tokenization.decode(self._tokenizer, [number])

    def encode(
        self, texts: Sequence[Sequence[str]], *, room: int | None = None
    ) -> list[list[int]]:
        """Tokens of texts in pieces, of which none becomes a control token.

        Raises:
          OutOfRoom: a text has more tokens than `room` behind its first piece.
        """
        firsts = [pieces[0] for pieces in texts]
        encoded = tokenization.encode(self._tokenizer, firsts, special=False)
        return [
            [*ids, *self.follow(pieces[1:], after=ids, room=room)]
            for ids, pieces in zip(encoded, texts, strict=True)
        ]

    def behind(
        self,
        pieces: Sequence[str],
        *,
        after: Sequence[int],
        size: int,
        joined: list[int] | None,
    ) -> list[int]:
        """The tokens of a text, in pieces, that follows another: rule 1.

        Args:
          after: all tokens before it.
          size: how many of these are of the text before it.
          joined: the tokens of that text and the first of `pieces` as one text; None
            where they stand apart.
        """
        if joined is None or joined[:size] != list(after[len(after) - size :]):
            return self.follow(pieces, after=after)
        ids = joined[size:]
        return [*ids, *self.follow(pieces[1:], after=[*after, *ids])]

    def follow(
        self, pieces: Sequence[str], *, after: Sequence[int], room: int | None = None
    ) -> list[int]:
        """The tokens of pieces that stand apart from what they follow.

        Raises:
          OutOfRoom: there are more than `room`.
        """
        ids = [*after]
        for piece in pieces:
            ids += self._middle(piece, after=ids)
            if room is not None and len(ids) - len(after) > room:
                raise OutOfRoom
        return ids[len(after) :]

    def _middle(self, text: str, *, after: Sequence[int]) -> list[int]:
        """Tokens of a text that decode to it behind others, and to no space more.

        Tokenizers as Llama 2's put a space in front of what they encode. Where another
        text stands in front of it, they do not.
        """
        if not text:
            return []
        size = CONTEXT
        while tokenization.decode(self._tokenizer, after[-size:]).startswith("�"):
            if size >= len(after):
                break
            size += CONTEXT  # it began within a character
        context = list(after[-size:])
        # A template's control tokens may follow, which are not decoded to their text.
        text_alone = text[: self._control.cutter().first(text)]
        expected = tokenization.decode(self._tokenizer, context) + text_alone
        (alone,) = tokenization.encode(self._tokenizer, [text], special=False)
        for ids in (alone, *self._behind_anchors(text)):
            whole = tokenization.decode(self._tokenizer, [*context, *ids])
            if whole.startswith(expected) and (text_alone != text or whole == expected):
                return ids
        return alone  # of a tokenizer that does not keep texts

    def _behind_anchors(self, text: str) -> Iterator[list[int]]:
        for anchor in ANCHORS:
            try:
                before, whole = tokenization.encode(
                    self._tokenizer, [anchor, anchor + text], special=False
                )
            except Exception:  # no token for the anchor
                continue
            if whole[: len(before)] == before:
                yield whole[len(before) :]
