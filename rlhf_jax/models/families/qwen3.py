"""Qwen 3, dense (arXiv:2505.09388): Llama with norms of every head's query and key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama, qwen2
from rlhf_jax.models.families.options import fields


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Qwen3 `config.json`."""
    options = fields.filled(config, {"head_dim": 128})
    model = llama.decoder_from_hf(options, family="qwen3")
    return dataclasses.replace(qwen2.with_windows(model, config), query_key_norm=True)


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return {
        **llama.decoder_to_hf(model),
        **qwen2.windows_to_hf(model),
        "attention_bias": model.attention_bias,
    }


FAMILY = keys.Family("qwen3", "Qwen3", config_from_hf, config_to_hf, llama.key_table)
