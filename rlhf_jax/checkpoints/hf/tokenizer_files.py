"""A tokenizer's files as transformers 4.57 and 5 both read them, with the same ids.

transformers 5 writes for itself. Read by 4.57, its folder fails where the class or the
form of an option is new, and where the class is an old one that 4.57 does not read from
tokenizer.json alone, it gives other ids in silence: its LlamaTokenizer and
GemmaTokenizer put a BOS before every text, and leave out an EOS after it, whatever
tokenizer.json says. So a tokenizer that tokenizer.json holds whole is named
PreTrainedTokenizerFast here, which both versions read from that file, and options that
a class used to imply are written down.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_jax.checkpoints import shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIG = "tokenizer_config.json"
_WHOLE = "tokenizer.json"
# Classes of tokenizers that have another file, as transformers 4.57 calls them.
_CLASSES_OF_5 = {
    "PythonBackend": "PreTrainedTokenizer",
    "MistralCommonBackend": "MistralCommonTokenizer",
}
_STANDARD = {
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}
# Of where it was read from, and of transformers 5 alone.
_LEFT_OUT = (
    *("backend", "is_local", "local_files_only", "name_or_path", "files_loaded"),
    *("fix_mistral_regex", "model_specific_special_tokens"),
)


def write(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, max_positions: int
) -> None:
    """Writes a tokenizer beside a model of that context, in tokens."""
    tokenizer.save_pretrained(folder)
    file = folder / _CONFIG
    if not file.exists():  # of a format of its own
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
    """The options of a tokenizer of which tokenizer.json has all that makes ids."""
    # 4.57 sets it in the file's pre-tokenizer to what the config says, or to false.
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
    """Further special tokens, in a form that both versions read.

    Of 4.57 `additional_special_tokens` is a list, and `extra_special_tokens` are names
    with tokens; of 5 `extra_special_tokens` is the list, and it reads the first as such
    where there is no second. It writes the names once more, as options.
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
