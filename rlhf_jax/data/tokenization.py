"""Tokenizers: loading, checking, special tokens, texts to ids and ids to texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.data import hub
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DOWNLOADED = [  # all that tokenizers are made of, and config.json names their class
    *("config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template*"),
    "additional_chat_templates/*",
]


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder or a hub id; InputError if there is none."""
    from transformers import AutoTokenizer

    expected = f"{path_or_id}: expected a folder with tokenizer.json, or a hub id, got"
    folder = hub.folder(path_or_id, patterns=_DOWNLOADED)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # the tokenizers library raises bare Exception
        said = " ".join(str(error).split())
        raise InputError(f"{expected}: {said:.200}") from error
    if tokenizer.vocab_size == 0:  # what transformers makes of a config.json alone
        raise InputError(
            f"{expected} none of its files; save the tokenizer there, or name the"
            " folder that holds it with --tokenizer"
        )
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
    """InputError if the tokenizer gives ids that a model of `vocab_size` lacks.

    The model may have more: checkpoints pad their embeddings.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise InputError(
            f"expected a tokenizer with ids below the model's vocabulary size"
            f" {vocab_size}, got id {largest} for {token!r}; use the tokenizer that the"
            " model was trained with"
        )


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills up rows, not EOS unless the tokenizer says so.

    Without one in the tokenizer any id does, since masks come from lengths.
    """
    pad = cast("int | None", tokenizer.pad_token_id)
    if pad is not None:
        return pad
    return 1 if tokenizer.eos_token_id == 0 else 0


def eos_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends a response; InputError if the tokenizer has none."""
    eos = cast("int | None", tokenizer.eos_token_id)
    if eos is None:
        raise InputError(
            "expected a tokenizer with an EOS token, got none; set eos_token in its"
            " tokenizer_config.json"
        )
    return eos


def texts(
    rollout: Rollout, *, decode: Callable[[list[int]], str]
) -> list[tuple[str, str]]:
    """(prompt, response) of every row, as text."""
    tokens, mask, response_mask = jax.device_get(
        (rollout.tokens, rollout.mask, rollout.response_mask)
    )
    return [
        (decode(row[kept & ~response].tolist()), decode(row[response].tolist()))
        for row, kept, response in zip(tokens, mask, response_mask, strict=True)
    ]


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool
) -> list[list[int]]:
    """Token ids of each text, with the tokenizer's special tokens if `special`."""
    if not texts:  # tokenizers raise an error for an empty list
        return []
    # verbose=False: lengths are checked here, against the context of the model.
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
