"""Writes tokenizer files that transformers 4.57 and 5 read with the same ids.

A folder that transformers 5 writes may fail in 4.57, if a class or the format of an
option is new, or silently give other ids: 4.57's LlamaTokenizer and GemmaTokenizer
prepend a BOS to every text and append no EOS, whatever tokenizer.json says. So a
tokenizer that is complete in tokenizer.json is named PreTrainedTokenizerFast here,
which both versions read from that file, and options that a class used to imply are
written explicitly.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_jax.checkpoints import shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIG = "tokenizer_config.json"
_WHOLE = "tokenizer.json"
# Names in transformers 4.57 of classes whose tokenizers have no tokenizer.json.
_CLASSES_OF_5 = {
    "PythonBackend": "PreTrainedTokenizer",
    "MistralCommonBackend": "MistralCommonTokenizer",
}
_STANDARD = {
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}
# Options about the place of origin, and options that only transformers 5 has.
_LEFT_OUT = (
    *("backend", "is_local", "local_files_only", "name_or_path", "files_loaded"),
    *("fix_mistral_regex", "model_specific_special_tokens"),
)


def write(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, max_positions: int
) -> None:
    """Writes a tokenizer beside a model whose context is `max_positions` tokens."""
    tokenizer.save_pretrained(folder)
    file = folder / _CONFIG
    if not file.exists():  # the tokenizer has its own format
        return
    config = shards.read_json(file)
    if (folder / _WHOLE).exists():
        config |= _read_from_one_file(tokenizer, shards.read_json(folder / _WHOLE))
    else:
        name = config.get("tokenizer_class")
        config["tokenizer_class"] = _CLASSES_OF_5.get(str(name), name)
    config |= _special_tokens(config)
    config["model_max_length"] = max_positions
    entries = {name: config[name] for name in sorted(config) if name not in _LEFT_OUT}
    shards.write_json(file, entries)


def _read_from_one_file(
    tokenizer: PreTrainedTokenizerBase, whole: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options of a tokenizer that is complete in tokenizer.json."""
    # 4.57 overwrites the pre-tokenizer's option with the config's, by default false.
    splitting = whole.get("pre_tokenizer") or {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": splitting.get("add_prefix_space", False),
        "model_input_names": list(tokenizer.model_input_names),
        "padding_side": tokenizer.padding_side,
        "truncation_side": tokenizer.truncation_side,
        "clean_up_tokenization_spaces": tokenizer.clean_up_tokenization_spaces,
    }


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Returns further special tokens in a format that both versions read.

    4.57 has a list `additional_special_tokens` and a dict `extra_special_tokens` of
    named tokens. 5 has a list `extra_special_tokens`, reads the former list if it is
    missing, and writes the named tokens as options of their own, too.
    """
    listed = config.pop("extra_special_tokens", None) or []
    named = {
        name: token
        for name, token in config.items()
        if name.endswith("_token") and name not in _STANDARD and isinstance(token, str)
    }
    if isinstance(listed, dict):
        listed, named = [], {**listed, **named}
    forms: dict[str, Any] = {}
    if listed:
        forms["additional_special_tokens"] = list(listed)
    if named:
        forms["extra_special_tokens"] = dict(named)
    return forms
