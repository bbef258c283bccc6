"""Tokenizers: loading, checks, special tokens, encoding and decoding."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlhf_jax.data import hub
from rlhf_jax.functional import unused_ids
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (  # patterns of all files of a tokenizer; config.json names its class
    *("config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template*"),
    "additional_chat_templates/*",
)
CONTEXT = 8  # tokens of context to decode; more than a character has
_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
MOST_IDS = 2**24  # far more than any tokenizer has
_SHAPES = [  # texts that test a tokenizer's rules of normalization and splitting
    *("The cat sat.", "THE CAT, the Cat", "  two  spaces ", "a\tb\n\nc\r\n"),
    *("12345 6.78", "it's don't we'll", "x = f(a[0]) != {b}  # c", "http://a.b/c?d=e"),
    *("naïve café ﬁ Å é", "日本語 한국어", "🙂🙃", "a_b-c/d\\e", "\u00a0\u200b|"),
]


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a checkpoint folder or hub id; InputError if none."""
    # An advisory says that PyTorch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    folder = hub.folder(path_or_id, patterns=FILES)
    cause: Exception | None = None
    got = (
        " none of its files; save the tokenizer there, or name the folder that holds it"
        " with --tokenizer, such as RUN/model of a run"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        if tokenizer.vocab_size > 0:  # 0: the folder has only a config.json
            return tokenizer
    except Exception as error:  # the tokenizers library raises bare Exception
        cause = error
        if has_files(folder):
            got = f": {' '.join(str(error).split()):.200}"
    raise InputError(
        f"{path_or_id}: expected a folder with tokenizer.json, or a hub id, got{got}"
    ) from cause


def has_files(path_or_id: str | Path) -> bool:
    """Whether a checkpoint folder or a hub id has a tokenizer, readable or not."""
    folder = hub.folder(path_or_id, patterns=FILES)
    return any(any(folder.glob(pattern)) for pattern in _FILES)


def probes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns texts that together have all tokens of a tokenizer, and `_SHAPES`.

    Two tokenizers that encode all of them to the same ids have the same rules, except
    for rules that these texts do not exercise.
    """
    ids = sorted(tokenizer.get_vocab().values())
    random.Random(0).shuffle(ids)
    starts = range(0, len(ids), 8)
    return [*_SHAPES, *(str(tokenizer.decode(ids[at : at + 8])) for at in starts)]


def digest(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> str:
    """Hashes the ids that a tokenizer gives texts; the first 12 digits of SHA-256."""
    ids = encode(tokenizer, texts, special=False)
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def differing(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> tuple[str, str, str] | None:
    """Finds a token or text to which two tokenizers give different ids.

    The other tokenizer may have more tokens, but must give all tokens of this one the
    same ids and encode `probes` to the same ids. Special tokens that a tokenizer adds
    around a text are ignored.

    Returns:
      The token or text, and what each tokenizer gives for it, with its digest; None if
      there is no difference.
    """
    ids, read = own.get_vocab(), other.get_vocab()
    for token, id_ in sorted(ids.items(), key=lambda item: item[1]):
        if read.get(token) != id_:
            return token, str(id_), str(read.get(token, "no id"))
    texts = probes(own)
    digests = digest(own, texts), digest(other, texts)
    if digests[0] == digests[1]:
        return None
    encoded = (encode(tokenizer, texts, special=False) for tokenizer in (own, other))
    text, mine, theirs = next(
        row for row in zip(texts, *encoded, strict=True) if row[1] != row[2]
    )
    return (
        text[:40],
        f"{mine!s:.60} (digest {digests[0]})",
        f"{theirs!s:.60} (digest {digests[1]})",
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
    """Raises InputError if the tokenizer has ids of at least `vocab_size`.

    The model may have more ids: checkpoints pad their embeddings.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise InputError(
            f"expected a tokenizer with ids below the model's vocabulary size"
            f" {vocab_size}, got id {largest} for {token!r}; use the tokenizer that the"
            " model was trained with"
        )


def ids_without_token(
    tokenizer: PreTrainedTokenizerBase, *, vocab_size: int
) -> unused_ids.Ranges:
    """Returns the ids below `vocab_size` without a token, for `ModelConfig.unused_ids`.

    Added and reserved tokens are tokens. They cannot be counted instead: ids may have
    gaps (`len(tokenizer)` is then below the largest id), and several ids may have the
    same text, of which `get_vocab` names only one.
    """
    used = set(tokenizer.get_vocab().values())
    if getattr(tokenizer, "is_fast", False):
        missing = [i for i in range(min(vocab_size, MOST_IDS)) if i not in used]
        texts = tokenizer.convert_ids_to_tokens(missing)
        used |= {i for i, text in zip(missing, texts, strict=True) if text is not None}
    return unused_ids.beside(used, vocab_size=vocab_size)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id that pads rows, which is EOS only if the tokenizer says so.

    If the tokenizer has none, any id will do, since masks come from lengths.
    """
    pad = cast("int | None", tokenizer.pad_token_id)
    if pad is not None:
        return pad
    return 1 if tokenizer.eos_token_id == 0 else 0


def eos_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id that ends a response; InputError if the tokenizer has none."""
    eos = cast("int | None", tokenizer.eos_token_id)
    if eos is None:
        raise InputError(
            "expected a tokenizer with an EOS token, got none; set eos_token in its"
            " tokenizer_config.json"
        )
    return eos


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool
) -> list[list[int]]:
    """Encodes texts, with the tokenizer's special tokens if `special`."""
    # verbose=False: lengths are checked elsewhere, against the model's context.
    return [
        ids
        for batch in progress.batches(texts, "texts to tokens")
        for ids in tokenizer([*batch], add_special_tokens=special, verbose=False)[
            "input_ids"
        ]
    ]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decodes ids, special tokens included, without cleaning up spaces."""
    text = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return cast(str, text)


def spoken(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, stop_ids: Sequence[int]
) -> str:
    """Decodes a prompt or a response for a reward or for display.

    Padding, BOS and stop tokens are left out; every other special token is kept.

    Args:
      stop_ids: tokens that end a response.
    """
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    left_out = (*special, *stop_ids)
    return decode(tokenizer, [number for number in ids if number not in left_out])


def pieces(ids: list[int], *, decode: Callable[[list[int]], str]) -> list[str]:
    """Returns the text that each token adds to the text before it.

    If several tokens make one character, the last shows the character and the others
    show "�".
    """
    return [
        piece(ids[at], before=ids[max(0, at - CONTEXT) : at], decode=decode)
        for at in range(len(ids))
    ]


def piece(token: int, *, before: list[int], decode: Callable[[list[int]], str]) -> str:
    """Returns the text that a token adds to the text of the few tokens before it.

    A token that is decoded alone may lose its space.
    """
    whole = decode([*before, token])
    return added([token], before=before, decode=decode) or (
        "�" if whole.endswith("�") else ""
    )


def added(
    tokens: list[int], *, before: list[int], decode: Callable[[list[int]], str]
) -> str:
    """Returns the text that tokens add to the text of the few tokens before them."""
    shorter, longer = decode(before), decode([*before, *tokens])
    if not longer.startswith(shorter):
        shorter = shorter.rstrip("�")
    return longer[len(shorter) :]
