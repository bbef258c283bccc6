"""Control tokens, and how the texts of rows are kept from becoming one.

A user may write "<|im_end|>", or a tool return it, by accident or to forge a turn.
Tokenizers read such a text as the control token. Here the text is cut within the
token's string, and the pieces are encoded separately:

    text      a<|im_end|>b
    pieces    a<        |im_end|>b

A text without such a string is not cut, so its ids are the tokenizer's own.
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

    These are the special tokens, stop ids that are added tokens, and added tokens that
    the chat template writes itself, such as Qwen3's `<tool_response>`. A stop id that
    is ordinary text, such as a line end, is no control token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Sequence[int]
    ) -> None:
        """Finds the control tokens; `stop_ids` end a response of the model."""
        self._tokenizer = tokenizer
        templates = tokenizer.chat_template  # a text, a dict of several, or None
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
        # The unknown token is no control token, unless it has another role, too.
        control -= set(_known([tokenizer.unk_token_id])) - named
        self.ids = frozenset(control)
        # Only one tag of a pair need be a control token: templates read "</think>".
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
        """Tags like <think> and </think>: control tokens that responses may contain."""

    def texts(self, number: int) -> set[str]:
        """Returns the texts that may stand for a token."""
        texts = {tokenization.decode(self._tokenizer, [number])}
        if number in self._added:
            texts.add(self._added[number].content)
        return {text for text in texts if text.strip()}

    @functools.lru_cache  # noqa: B019  # as many as rows ask for by name
    def cutter(self, allowed: frozenset[int] = frozenset()) -> Cutter:
        """Returns the cutter of all control tokens that are not allowed."""
        ids = self.ids - allowed
        texts = {text for number in ids for text in self.texts(number)}
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # Whether each token only arises from its own string, unchanged by a normalizer.
        literal = all(number in self._added for number in ids) and (
            (backend is not None and backend.normalizer is None)
            or (
                all(not self._added[number].normalized for number in ids)
                and (backend is None or _merges_alone(backend))
            )
        )
        return Cutter(self._tokenizer, ids=ids, texts=texts, literal=literal)


class Cutter:
    """Cuts texts so that no piece contains one of some control tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ids: frozenset[int],
        texts: Iterable[str],
        literal: bool,
    ) -> None:
        """Makes a cutter of tokens that `texts` may stand for.

        If not `literal`, other texts may become such tokens, so texts are encoded.
        """
        self._tokenizer, self._ids, self._literal = tokenizer, ids, literal
        longest = sorted(texts, key=len, reverse=True)
        self._beginnings = {text[:2] for text in longest}
        # A lookahead also finds matches that overlap.
        self._regex = re.compile(f"(?=({'|'.join(map(re.escape, longest)) or '(?!)'}))")

    def first(self, text: str) -> int:
        """Returns the position of the first control token, else the text's length."""
        match = self._regex.search(text)
        return len(text) if match is None else match.start()

    def named(self, text: str) -> str:
        """Returns the first control token in a text; "" if there is none."""
        match = self._regex.search(text)
        return "" if match is None else match[1]

    def pieces(self, text: str) -> list[str]:
        """Cuts a text into pieces that, encoded separately, contain no control token.

        Returns:
          The text itself as one piece if it contains none. A character that is a
          control token by itself cannot be cut and is dropped; `RowPieces` rejects
          such rows.
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
        """Halves a text until no part contains a control token.

        Needed for texts that a normalizer turns into the string of a token.
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
        """Takes the arguments of `TextContract`."""
        self._tokenizer, self._stop_ids, self._receipt = tokenizer, stop_ids, receipt
        self._dropped: set[tuple[str, str]] = set()
        self.control = Control(tokenizer, stop_ids=stop_ids)

    def of_others(self, text: str, question: Question) -> list[str]:
        """Cuts the text of a user, a tool or a prompt; returns at least one piece."""
        return self._cut(
            text, self.control.cutter(self.control_ids(question)), question
        )

    def of_observation(self, text: str, question: Question) -> list[str]:
        """Cuts the text of an environment, which the receipt does not note."""
        return self.control.cutter(self.control_ids(question)).pieces(text)

    def of_response(
        self, text: str, question: Question
    ) -> tuple[list[str], int | None]:
        """Cuts a response.

        Returns:
          At least one piece, and the stop token written at the end, None if none.
        """
        text, stop = self.without_stop(text)
        return self.of_assistant(text, question), stop

    def of_assistant(self, text: str, question: Question) -> list[str]:
        """Cuts the text of an assistant's turn, which may contain tags."""
        allowed = self.control.tags | self.control_ids(question)
        return self._cut(text, self.control.cutter(allowed), question)

    def control_ids(self, question: Question) -> frozenset[int]:
        """Returns the tokens that a row names; InputError if one does not exist."""
        if not question.control:
            return frozenset()
        vocabulary = self._tokenizer.get_vocab()
        missing = [name for name in question.control if name not in vocabulary]
        if missing:
            raise InputError(
                f"expected tokens of the tokenizer in"
                f" {messages.CONTROL_TOKENS!r}, got {missing[0]!r:.60}, which it does"
                " not have; correct the row"
            )
        return frozenset(vocabulary[name] for name in question.control)

    def without_stop(self, text: str) -> tuple[str, int | None]:
        """Splits a response into its text and the stop token written at its end."""
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
        """Cuts a text; the receipt notes each reason once per row."""
        pieces = cutter.pieces(text)
        if pieces == [text]:
            return pieces
        if "".join(pieces) != text:
            raise InputError(
                f"expected text that tokens spell, got {text!r:.60},"
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
    """Whether a `tokenizers.Tokenizer` makes its tokens by merges alone.

    Other models look up the normalized text: NFKC turns "＜/s＞" into "</s>", for which
    Unigram has a token.
    """
    from tokenizers import models

    return isinstance(backend.model, models.BPE) and not backend.model.ignore_merges


def _known(ids: Iterable[Any]) -> list[int]:
    """Drops the ids that the tokenizer does not define."""
    return [number for number in ids if isinstance(number, int)]
