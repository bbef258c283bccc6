"""Control tokens, and text that is kept from becoming one.

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
        """For these tokens.

        Args:
          texts: how they are written.
          literal: whether nothing but these texts becomes one of the tokens; otherwise
            the tokenizer is asked.
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
