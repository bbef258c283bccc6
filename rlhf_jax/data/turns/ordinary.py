"""Text that no one has written as a control token, and how it is kept from being one.

A tool may return "<|im_end|>", by accident or to take the user's part. Tokenizers read
such a text as the control token. Here it is cut within the token's string:

    text      a<|im_end|>b
    pieces    a<        |im_end|>b        encoded apart, so of ordinary tokens

What holds no such string is not cut, so its ids are those that the tokenizer gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data import tokenization

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Ordinary:
    """Cuts texts so that no piece holds a control token of a tokenizer.

    Control tokens are the special tokens, the stop ids, and whatever else of the added
    tokens stands in the chat template's own text, as Qwen3's `<tool_response>`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Sequence[int]
    ) -> None:
        """Of a tokenizer and the tokens that end a model's response."""
        self._tokenizer = tokenizer
        templates = tokenizer.chat_template  # several have names; there may be none
        if isinstance(templates, dict):
            templates = "".join(templates.values())
        added = tokenizer.added_tokens_decoder
        control = {
            number
            for number, token in added.items()
            if token.special
            or (token.content.strip() and token.content in (templates or ""))
        }
        control |= set(_known(tokenizer.all_special_ids))
        # What stands for an unknown word is no control token, unless it is one besides.
        named = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        unknown = set(_known([tokenizer.unk_token_id])) - set(_known(named))
        unknown -= set(stop_ids)
        self.ids = frozenset((control | set(stop_ids)) - unknown)
        texts = {str(tokenizer.decode([number])) for number in self.ids}
        texts |= {added[number].content for number in self.ids & added.keys()}
        longest = sorted(filter(str.strip, texts), key=len, reverse=True)
        # Looking ahead finds those that overlap, too.
        self._found = re.compile(f"(?={'|'.join(map(re.escape, longest))})")

    def pieces(self, text: str) -> list[str]:
        """The text in pieces that, encoded apart, hold no control token.

        One piece, the text itself, where it held none.
        """
        if self._is_ordinary(text):
            return [text]
        cuts = [match.start() + 1 for match in self._found.finditer(text)]
        pieces = [
            text[start:end]
            for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        ]
        # Tokenizers may read other characters as those of the token's string: these
        # pieces are spelt. A letter that is a control token itself is left out.
        return [
            part
            for piece in pieces
            for part in ([piece] if self._is_ordinary(piece) else piece)
            if self._is_ordinary(part)
        ]

    def encode(self, text: str) -> list[int]:
        """Ids of the text, none of which is a control token."""
        pieces = tokenization.encode(self._tokenizer, self.pieces(text), special=False)
        return [number for piece in pieces for number in piece]

    def _is_ordinary(self, text: str) -> bool:
        (ids,) = tokenization.encode(self._tokenizer, [text], special=False)
        return self.ids.isdisjoint(ids)


def _known(ids: Iterable[Any]) -> list[int]:
    """Those that a tokenizer has."""
    return [number for number in ids if isinstance(number, int)]
