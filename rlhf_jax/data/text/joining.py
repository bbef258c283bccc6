"""Encodes texts in pieces, and texts that follow other texts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data import tokenization
from rlhf_jax.data.text.control import Control

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = ("a", "0", "x", ".", "\n", "the")  # texts that most tokenizers can encode
ANCHORS = ("\n", ".", "a", "0", " ")  # texts that are put before a text to encode it


class OutOfRoom(Exception):
    """A text has more tokens than there is room for; its remainder is not encoded."""


class Joining:
    """Encodes texts that begin or follow others, for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, control: Control) -> None:
        """Stores a tokenizer and its control tokens."""
        self._tokenizer, self._control = tokenizer, control

    @functools.cached_property
    def prefix(self) -> list[int]:
        """The tokens that the tokenizer prepends to a text, such as BOS."""
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
        """Decodes a few tokens; the tokenizer may have a token for none of PROBES."""
        ids = sorted(set(self._tokenizer.get_vocab().values()) - self._control.ids)
        for number in ids[:4]:
            yield tokenization.decode(self._tokenizer, [number])

    def encode(
        self, texts: Sequence[Sequence[str]], *, room: int | None = None
    ) -> list[list[int]]:
        """Encodes texts in pieces, so that no text becomes a control token.

        Raises:
          OutOfRoom: a text has more than `room` tokens after its first piece.
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
        """Encodes a text that follows another by rule 1 of the text contract.

        Args:
          pieces: the pieces of the text.
          after: all tokens before the text.
          size: how many of these belong to the text before it.
          joined: the tokens of the text before and the first piece as one text; None if
            they must be encoded separately.
        """
        if joined is None or joined[:size] != list(after[len(after) - size :]):
            return self.follow(pieces, after=after)
        ids = joined[size:]
        return [*ids, *self.follow(pieces[1:], after=[*after, *ids])]

    def follow(
        self, pieces: Sequence[str], *, after: Sequence[int], room: int | None = None
    ) -> list[int]:
        """Encodes pieces so that no token spans a border.

        Raises:
          OutOfRoom: the pieces have more than `room` tokens.
        """
        ids = [*after]
        for piece in pieces:
            ids += self._middle(piece, after=ids)
            if room is not None and len(ids) - len(after) > room:
                raise OutOfRoom
        return ids[len(after) :]

    def _middle(self, text: str, *, after: Sequence[int]) -> list[int]:
        """Encodes a text so that, after other tokens, it decodes to exactly this text.

        Tokenizers such as Llama 2's prepend a space to a text. They do not if another
        text precedes it, so the text is also encoded after `ANCHORS`.
        """
        if not text:
            return []
        size = tokenization.CONTEXT
        while tokenization.decode(self._tokenizer, after[-size:]).startswith("�"):
            if size >= len(after):
                break
            size += tokenization.CONTEXT  # the context began within a character
        context = list(after[-size:])
        # Compare up to the template's first control token, which may decode otherwise.
        text_alone = text[: self._control.cutter().first(text)]
        expected = tokenization.decode(self._tokenizer, context) + text_alone
        (alone,) = tokenization.encode(self._tokenizer, [text], special=False)
        for ids in (alone, *self._behind_anchors(text)):
            whole = tokenization.decode(self._tokenizer, [*context, *ids])
            if whole.startswith(expected) and (text_alone != text or whole == expected):
                return ids
        return alone  # the tokenizer does not preserve texts

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
