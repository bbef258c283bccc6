"""SmolLM3: Llama in which every fourth layer has no positions (arXiv:2501.18795)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields, windows

# For options missing from config.json: transformers 4 did not write defaults.
DEFAULTS = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a SmolLM3 `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    options = fields.filled(config, DEFAULTS)
    if "num_key_value_heads" not in config:
        options["num_key_value_heads"] = 4
    model = llama.decoder_from_hf(options, family="smollm3")
    unrotated = _unrotated(options, num_layers=model.num_layers)
    model = windows.from_hf(
        model,
        config,
        window=(
            config.get("sliding_window")
            if fields.option(config, "use_sliding_window", False)
            else None
        ),
        default=lambda layer: unrotated[layer],
    )
    return dataclasses.replace(
        model, unrotated_layers=unrotated if any(unrotated) else ()
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return llama.config_to_hf(model) | {
        "no_rope_layers": [
            int(not model.is_unrotated(layer)) for layer in range(model.num_layers)
        ],
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "layer_types": windows.layer_types(model),
    }


def _unrotated(options: Mapping[str, Any], *, num_layers: int) -> tuple[bool, ...]:
    rotated = options.get("no_rope_layers")
    if rotated is None:
        period = fields.option(options, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % period == 0 for layer in range(num_layers))
    if len(rotated) < num_layers:
        raise InputError(
            f"config.json: expected no_rope_layers to say 1 for each of {num_layers} "
            f"layers that has rotary positions and 0 for one without, got "
            f"{len(rotated)} entries; correct either"
        )
    return tuple(not one for one in rotated[:num_layers])


FAMILY = keys.Family(
    "smollm3", "SmolLM3", config_from_hf, config_to_hf, llama.key_table
)
