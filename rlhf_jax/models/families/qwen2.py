"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115): Llama with biases in attention.

Queries, keys and values have a bias, the output has none. With `use_sliding_window`
layers from `max_window_layers` on are local.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields, windows


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Qwen2 `config.json`."""
    model = llama.decoder_from_hf(config, family="qwen2")
    return dataclasses.replace(
        with_windows(model, config), attention_bias=True, attention_output_bias=False
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return llama.decoder_to_hf(model) | windows_to_hf(model)


def with_windows(model: ModelConfig, config: Mapping[str, Any]) -> ModelConfig:
    """The model with the sliding windows of Qwen's options."""
    first = fields.option(config, "max_window_layers", 28)
    return windows.from_hf(
        model,
        config,
        window=(
            fields.option(config, "sliding_window", 4096)
            if fields.option(config, "use_sliding_window", False)
            else None
        ),
        default=lambda layer: layer >= first,
    )


def windows_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The options that `with_windows` reads back."""
    local = [layer for layer in range(model.num_layers) if model.is_local(layer)]
    return {
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        # For versions of transformers without layer_types.
        "max_window_layers": min(local, default=model.num_layers),
        "layer_types": windows.layer_types(model),
    }


FAMILY = keys.Family("qwen2", "Qwen2", config_from_hf, config_to_hf, llama.key_table)
