"""Gemma 3, the language model (arXiv:2503.19786): Gemma 2 with norms of query and key.

There are five local layers per global one, and each kind has its own rotary base. Only
global layers may be scaled. Attention has no soft cap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import gemma2, keys
from rlhf_jax.models.families.options import fields, rotary

# For options missing from config.json, as they are from 4B on.
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_208,
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Gemma3 text `config.json`.

    Reads `rope_theta`, `rope_local_base_freq` and `rope_scaling`, or the
    `rope_parameters` of transformers 5, which have base and scaling per kind of layer.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    # transformers has the option, and computes without a soft cap.
    fields.only(config, {"attn_logit_softcapping": None})
    config = fields.filled(config, DEFAULTS)
    near, far = rotary.by_kind_of_layer(config)
    pattern = fields.option(config, "sliding_window_pattern", 6)
    model = gemma2.decoder_from_hf(
        {
            **config,
            "rope_theta": fields.option(config, "rope_theta", 1e6),
            "rope_parameters": far,
            "rope_scaling": None,
        },
        family="gemma3_text",
        local=lambda layer: (layer + 1) % pattern != 0,
    )
    rope_local_theta, _ = rotary.from_hf(
        {**config, "rope_parameters": near, "rope_scaling": None},
        theta="rope_local_base_freq",
    )
    return dataclasses.replace(
        model,
        query_key_norm=True,
        rope_local_theta=rope_local_theta,
        logit_softcap=config.get("final_logit_softcapping"),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return gemma2.decoder_to_hf(model) | {
        "rope_local_base_freq": model.rope_local_theta,
        "final_logit_softcapping": model.logit_softcap,
    }


FAMILY = keys.Family(
    "gemma3_text",
    "Gemma3",
    config_from_hf,
    config_to_hf,
    gemma2.key_table,
    classifier_suffix="TextForSequenceClassification",
)
