"""OLMo 2 (arXiv:2501.00656): Llama with norms after attention and MLP, not before.

One norm spans the queries of all heads together, and one the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields

NORMS = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of an Olmo2 `config.json`."""
    return decoder_from_hf(config, family="olmo2")


def decoder_from_hf(config: Mapping[str, Any], *, family: str) -> ModelConfig:
    """The decoder of the options that OLMo 2 and 3 name alike.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    fields.only(config, {"clip_qkv": None, "mlp_bias": False})
    options = fields.filled(config, {"rms_norm_eps": 1e-5})
    return dataclasses.replace(
        llama.decoder_from_hf(options, family=family),
        query_key_norm=True,
        joint_head_norm=True,
        pre_norms=False,
        post_norms=True,
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return llama.decoder_to_hf(model) | {"attention_bias": model.attention_bias}


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names, without norms on the inputs of attention and MLP."""
    return llama.key_table(model, norms=NORMS)


FAMILY = keys.Family("olmo2", "Olmo2", config_from_hf, config_to_hf, key_table)
