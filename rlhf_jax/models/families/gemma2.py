"""Gemma 2 (arXiv:2408.00118): norms before and after blocks, every other layer local.

Attention and the head are soft-capped, norms multiply by 1 + weight, and embeddings are
multiplied by sqrt(hidden_size).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields, windows

# For options missing from config.json: transformers 4 did not write defaults.
DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Gemma2 `config.json`."""
    options = SOFTCAPS | dict(config)
    return dataclasses.replace(
        decoder_from_hf(options, family="gemma2", local=lambda layer: layer % 2 == 0),
        attention_softcap=options["attn_logit_softcapping"],
        logit_softcap=options["final_logit_softcapping"],
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return decoder_to_hf(model) | {
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
    }


def decoder_from_hf(
    config: Mapping[str, Any], *, family: str, local: windows.Local
) -> ModelConfig:
    """The decoder of the options that Gemma 2 and 3 name alike.

    Args:
      local: which layers are local in a config without `layer_types`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    fields.only(config, {"use_bidirectional_attention": False})
    options = fields.filled(config, DEFAULTS)
    model = llama.decoder_from_hf(
        options, family=family, activation="hidden_activation"
    )
    if config.get("layer_types") is None:  # some are local and need a window
        fields.required(DEFAULTS | dict(config), "sliding_window")
    model = windows.from_hf(
        model,
        config,
        window=config.get("sliding_window", DEFAULTS["sliding_window"]),
        default=local,
    )
    return dataclasses.replace(
        model,
        norm_from_one=True,
        post_norms=True,
        query_scale=options["query_pre_attn_scalar"] ** -0.5,
        embed_scale=model.hidden_size**0.5,
    )


def decoder_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The options that `decoder_from_hf` reads back."""
    options = llama.decoder_to_hf(model)
    activation = options.pop("hidden_act")
    scale = model.head_dim**-0.5 if model.query_scale is None else model.query_scale
    scalar = scale**-2
    whole = round(scalar)  # transformers has an integer
    return options | {
        # The name that other readers of Gemma expect; the function is the same.
        "hidden_activation": (
            "gelu_pytorch_tanh" if activation == "gelu_new" else activation
        ),
        "attention_bias": model.attention_bias,
        "query_pre_attn_scalar": whole if whole**-0.5 == scale else scalar,
        # transformers requires a window even if no layer is local.
        "sliding_window": model.sliding_window or DEFAULTS["sliding_window"],
        "layer_types": windows.layer_types(model),
    }


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names, and those of norms on the outputs of attention and MLP."""
    return llama.key_table(model, norms=NORMS)


FAMILY = keys.Family("gemma2", "Gemma2", config_from_hf, config_to_hf, key_table)
