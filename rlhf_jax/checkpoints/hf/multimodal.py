"""Finds the language model in a multimodal checkpoint: its options and its tensors.

    config.json    {"model_type": "qwen3_5", "text_config": {...}, "vision_config": ...}
    tensors        model.language_model.layers.0...    read as model.layers.0...
                   model.visual..., mtp...             left out, and counted

Saved checkpoints contain the language model only.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from rlhf_jax.checkpoints.hf import layout

# Prefixes of transformers 5, then of older files.
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# "mtp" is multi-token prediction.
TOWERS = ("visual", "vision_tower", "audio_tower", "multi_modal_projector")
LEFT_OUT = ("mtp", "embed_vision", "embed_audio", *TOWERS)
# Options of the whole model that take precedence over the language model's.
OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
OUTSIDE += ("tie_word_embeddings",)


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a checkpoint with the language model only.

    Args:
      config: content of a config.json; returned unchanged if it is not multimodal.
    """
    name, inner = f"{config.get('model_type')}_text", config.get("text_config")
    if not isinstance(inner, dict) or name not in layout.FAMILIES:
        return dict(config)
    family = layout.FAMILIES[name]
    architectures = config.get("architectures")
    if architectures == [f"{family.stem}ForConditionalGeneration"]:
        architectures = [family.causal]
    outside = {key: config[key] for key in OUTSIDE if config.get(key) is not None}
    return {"model_type": name, **inner, **outside, "architectures": architectures}


class Names:
    """Maps names of tensors to the language model's, and counts all other tensors."""

    def __init__(self) -> None:
        """Starts the counts of one checkpoint."""
        self._left_out: collections.Counter[str] = collections.Counter()

    def __call__(self, name: str) -> str | None:
        """Returns the name in a language model; None for other tensors."""
        for theirs, ours in PREFIXES.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        part = name.removeprefix("model.").partition(".")[0]
        if part not in LEFT_OUT:
            return name
        self._left_out[part] += 1
        return None

    @property
    def left_out(self) -> str:
        """The counts of tensors left out, for a message; "" if none."""
        counts = sorted(self._left_out.items())
        return ", ".join(f"{count} of {part}" for part, count in counts)
