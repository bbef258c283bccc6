"""Which ids of a model's vocabulary its tokenizer has a token for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_jax.functional import unused_ids
from rlhf_jax.functional.unused_ids import Ranges

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def unused(tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> Ranges:
    """The ids below `vocab_size` that no token has, as `ModelConfig.unused_ids`.

    Added and reserved tokens are tokens. The number of tokens does not tell: ids may
    have holes (`len(tokenizer)` is then below the largest id), and several ids may have
    one text, of which `get_vocab` names one.
    """
    used = set(tokenizer.get_vocab().values())
    if getattr(tokenizer, "is_fast", False):
        missing = [i for i in range(vocab_size) if i not in used]
        texts = tokenizer.convert_ids_to_tokens(missing)
        used |= {i for i, text in zip(missing, texts, strict=True) if text is not None}
    return unused_ids.beside(used, vocab_size=vocab_size)
