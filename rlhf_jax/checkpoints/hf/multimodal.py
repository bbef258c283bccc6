"""The language model in a multimodal checkpoint: its options, the names of its tensors.

    config.json    {"model_type": "qwen3_5", "text_config": {...}, "vision_config": ...}
    tensors        model.language_model.layers.0...    read as model.layers.0...
                   model.visual..., mtp...             left out, and counted

What is saved is a checkpoint of the language model alone.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from rlhf_jax.checkpoints.hf import layout

# Those of transformers 5, then of files from before it.
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# "mtp" predicts several tokens at once.
TOWERS = ("visual", "vision_tower", "audio_tower", "multi_modal_projector")
LEFT_OUT = ("mtp", "embed_vision", "embed_audio", *TOWERS)
# Options beside the language model's that go before its own.
OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
OUTSIDE += ("tie_word_embeddings",)


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a checkpoint of the language model alone would have.

    Args:
      config: of a config.json; any but a multimodal model's is returned as it is.
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
    """Names tensors as the language model alone would, and counts all others."""

    def __init__(self) -> None:
        """Of one checkpoint."""
        self._left_out: collections.Counter[str] = collections.Counter()

    def __call__(self, name: str) -> str | None:
        """The name; None is of no language model."""
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
        """How many of what, for a message; "" is none."""
        counts = sorted(self._left_out.items())
        return ", ".join(f"{count} of {part}" for part, count in counts)
