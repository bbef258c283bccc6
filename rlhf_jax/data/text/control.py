"""Control tokens, and texts of rows that are kept from becoming one.

A user may write "<|im_end|>", or a tool return it, by accident or to take another's
turn. Tokenizers read such a text as the control token. Here it is cut within the
token's string, and the pieces are encoded apart:

    text      a<|im_end|>b
    pieces    a<        |im_end|>b

A text that holds no such string is not cut, so its ids are the tokenizer's own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data import tokenization
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import messages
from rlhf_jax.data.text.messages import Question
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAG = re.compile(r"<(/?)([^\s<>/|]+)>")  # <think> and </think>


class Control:
    """The control tokens of a tokenizer and a model.

    They are the special tokens, such stop ids as are added tokens, and whatever else of
    the added tokens stands in the chat template's own text, as Qwen3's
    `<tool_response>`. A stop id that is ordinary text, as a line end, is none: it may
    stand in a prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Sequence[int]
    ) -> None:
        """Of a tokenizer, and of the tokens that end a model's response."""
        self._tokenizer = tokenizer
        templates = tokenizer.chat_template  # several have names; there may be none
        if isinstance(templates, dict):
            templates = "".join(templates.values())
        self._added = added = tokenizer.added_tokens_decoder
        control = {
            number
            for number, token in added.items()
            if token.special
            or number in stop_ids
            or (token.content.strip() and token.content in (templates or ""))
        }
        control |= set(_known(tokenizer.all_special_ids))
        ends = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        named = {*_known(ends), *stop_ids}
        # What stands for an unknown word is no control token, unless it is one besides.
        control -= set(_known([tokenizer.unk_token_id])) - named
        self.ids = frozenset(control)
        # One of a pair may be no control token: a template may read "</think>" alone.
        names = {token.content: number for number, token in added.items()}
        matches = {text: TAG.fullmatch(text) for text in names}
        self.tags = frozenset(
            names[text]
            for text, tag in matches.items()
            if tag is not None
            and names[text] in control
            and f"<{'' if tag[1] else '/'}{tag[2]}>" in names
            and names[text] not in named
        )
        """Tags as <think> and </think>: control tokens that a response may hold."""

    def texts(self, number: int) -> set[str]:
        """How a token may be written."""
        texts = {tokenization.decode(self._tokenizer, [number])}
        if number in self._added:
            texts.add(self._added[number].content)
        return {text for text in texts if text.strip()}

    @functools.lru_cache  # noqa: B019  # as many as rows ask for by name
    def cutter(self, allowed: frozenset[int] = frozenset()) -> Cutter:
        """What cuts all control tokens but these."""
        ids = self.ids - allowed
        texts = {text for number in ids for text in self.texts(number)}
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # Tokens that the tokenizer finds in a text as it is, by their own string.
        literal = all(number in self._added for number in ids) and (
            (backend is not None and backend.normalizer is None)
            or (
                all(not self._added[number].normalized for number in ids)
                and (backend is None or _merges_alone(backend))
            )
        )
        return Cutter(self._tokenizer, ids=ids, texts=texts, literal=literal)


class Cutter:
    """Cuts texts so that no piece holds one of some control tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ids: frozenset[int],
        texts: Iterable[str],
        literal: bool,
    ) -> None:
        """For tokens that are written as `texts`.

        Where `literal` nothing else becomes one of them; else the tokenizer is asked.
        """
        self._tokenizer, self._ids, self._literal = tokenizer, ids, literal
        longest = sorted(texts, key=len, reverse=True)
        self._beginnings = {text[:2] for text in longest}
        # Looking ahead finds those that overlap, too.
        self._regex = re.compile(f"(?=({'|'.join(map(re.escape, longest)) or '(?!)'}))")

    def first(self, text: str) -> int:
        """Where the first text of a token begins, or the text's length."""
        match = self._regex.search(text)
        return len(text) if match is None else match.start()

    def named(self, text: str) -> str:
        """The first token whose text stands in a text; "" where there is none."""
        match = self._regex.search(text)
        return "" if match is None else match[1]

    def pieces(self, text: str) -> list[str]:
        """The text in pieces that, encoded apart, hold none of the tokens.

        Returns:
          One piece, the text itself, where it held none. A character that is a control
          token by itself cannot be cut and is left out; `RowPieces` refuses such rows.
        """
        if self._is_ordinary(text):
            return [text]
        cuts = [match.start() + 1 for match in self._regex.finditer(text)]
        pieces = [
            text[start:end]
            for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        ]
        return [part for piece in pieces for part in self._halved(piece)]

    def _halved(self, text: str) -> list[str]:
        """A text in halves of halves that hold none of the tokens.

        Tokenizers may read other characters as those of a token's string.
        """
        if self._is_ordinary(text):
            return [text]
        middle = len(text) // 2
        if not middle:
            return []
        return [*self._halved(text[:middle]), *self._halved(text[middle:])]

    def _is_ordinary(self, text: str) -> bool:
        if self._literal:
            return (
                not any(beginning in text for beginning in self._beginnings)
                or self._regex.search(text) is None
            )
        (ids,) = tokenization.encode(self._tokenizer, [text], special=False)
        return self._ids.isdisjoint(ids)


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
        """The control tokens that a row asks for by name, which the tokenizer has."""
        if not question.control:
            return frozenset()
        vocabulary = self._tokenizer.get_vocab()
        missing = [name for name in question.control if name not in vocabulary]
        if missing:
            raise InputError(
                f"{question.where}: expected tokens of the tokenizer in"
                f" {messages.CONTROL_TOKENS!r}, got {missing[0]!r:.60}, which it does"
                " not have; correct the row"
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


def _merges_alone(backend: Any) -> bool:
    """Whether merges alone make the tokens of a `tokenizers.Tokenizer`.

    Other models look a text up as it is after the normalizer: NFKC makes "</s>" of
    "＜/s＞", and Unigram has a token for that.
    """
    from tokenizers import models

    return isinstance(backend.model, models.BPE) and not backend.model.ignore_merges


def _known(ids: Iterable[Any]) -> list[int]:
    """Those that a tokenizer has."""
    return [number for number in ids if isinstance(number, int)]
