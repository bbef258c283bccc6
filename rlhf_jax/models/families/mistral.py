"""Mistral 7B (arXiv:2310.06825): Llama with a sliding window in each layer, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import windows


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Mistral `config.json`."""
    return windows.in_every_layer(
        llama.decoder_from_hf(config, family="mistral"),
        window=config.get("sliding_window", 4096),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return llama.decoder_to_hf(model) | {"sliding_window": model.sliding_window}


FAMILY = keys.Family(
    "mistral", "Mistral", config_from_hf, config_to_hf, llama.key_table
)
