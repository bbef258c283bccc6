"""Texts of rows in pieces that hold no control token, but those that they may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import messages
from rlhf_jax.data.text.control import Control, Cutter
from rlhf_jax.data.text.question import Question
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowPieces:
    """Cuts the texts of rows, for one tokenizer and one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        receipt: Receipt | None,
    ) -> None:
        """Of a tokenizer; arguments as those of `TextContract`."""
        self._tokenizer, self._stop_ids, self._receipt = tokenizer, stop_ids, receipt
        self._dropped: set[tuple[str, str]] = set()
        self.control = Control(tokenizer, stop_ids=stop_ids)

    def of_others(self, text: str, question: Question) -> list[str]:
        """What a user, a tool or the author of a prompt wrote; at least one piece."""
        return self._cut(
            text, self.control.cutter(self.control_ids(question)), question
        )

    def of_observation(self, text: str, question: Question) -> list[str]:
        """What an environment wrote, of which no receipt is told."""
        return self.control.cutter(self.control_ids(question)).pieces(text)

    def of_response(
        self, text: str, question: Question
    ) -> tuple[list[str], int | None]:
        """A response; at least one piece.

        Returns:
          Pieces, and the stop token that was written at the end by hand.
        """
        text, stop = self.without_stop(text)
        return self.of_assistant(text, question), stop

    def of_assistant(self, text: str, question: Question) -> list[str]:
        """What stands in a turn of the assistant, which may hold tags."""
        allowed = self.control.tags | self.control_ids(question)
        return self._cut(text, self.control.cutter(allowed), question)

    def control_ids(self, question: Question) -> frozenset[int]:
        """The control tokens that a row asks for by name.

        Raises:
          InputError: the tokenizer has no such token.
        """
        if not question.control:
            return frozenset()
        vocabulary = self._tokenizer.get_vocab()
        for name in question.control:
            if name not in vocabulary:
                raise InputError(
                    f"{question.where}: expected tokens of the tokenizer in"
                    f" {messages.CONTROL_TOKENS!r}, got {name!r:.60}, which it does not"
                    " have; correct the row"
                )
        return frozenset(vocabulary[name] for name in question.control)

    def without_stop(self, text: str) -> tuple[str, int | None]:
        """A response without the stop token that was written at its end, and that."""
        by_hand = {
            name: number
            for number in self._stop_ids
            if number in self.control.ids
            for name in self.control.texts(number)
            if text.endswith(name)
        }
        if not by_hand:
            return text, None
        name = max(by_hand, key=len)
        return text[: -len(name)], by_hand[name]

    def _cut(self, text: str, cutter: Cutter, question: Question) -> list[str]:
        """A text in pieces, of which the receipt is told once for each row."""
        pieces = cutter.pieces(text)
        if pieces == [text]:
            return pieces
        if "".join(pieces) != text:
            raise InputError(
                f"{question.where}: expected text that tokens spell, got {text!r:.60},"
                " a character of which is a control token by itself; remove it, or name"
                f" the token in {messages.CONTROL_TOKENS!r} of the row"
            )
        name = cutter.named(text)
        reason = (
            f"text {name!r} is no control token; name it in"
            f" {messages.CONTROL_TOKENS!r} of the row to have it read as one"
            if name
            else "text that the tokenizer would read as a control token stays text"
        )
        if self._receipt is not None and (question.where, reason) not in self._dropped:
            self._dropped.add((question.where, reason))
            self._receipt.note(reason, where=question.where)
        return pieces
