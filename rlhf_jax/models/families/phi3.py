"""Phi-3 (arXiv:2404.14219): Llama with fused projections and partial rotary heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields, rotary, windows


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Phi3 `config.json`."""
    scaling = rotary.parameters(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        # Phi-3 configs also call longrope "su" or "yarn".
        long = ", which is longrope" if kind in ("su", "yarn") else ""
        raise InputError(
            f"config.json: expected a rope_type of default in this family, got "
            f"{kind!r}{long}; use a checkpoint of the short context (4k)"
        )
    # transformers' Phi-3 has no attention bias, whatever an older config says.
    options = fields.filled(config, {"rms_norm_eps": 1e-5}) | {"attention_bias": False}
    return windows.in_every_layer(
        llama.decoder_from_hf(options, family="phi3", partial_rotary=True),
        window=config.get("sliding_window"),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return llama.decoder_to_hf(model) | {
        "sliding_window": model.sliding_window,
        "partial_rotary_factor": rotary.share(model),
    }


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names, except the fused projections."""
    layer, ours, mlp = "model.layers.{layer}", "layers/attention", "layers/mlp"
    qkv, output = (f"{ours}/query", f"{ours}/key", f"{ours}/value"), f"{ours}/output"
    gate_up, down = (f"{mlp}/gate", f"{mlp}/up"), f"{mlp}/down"
    return llama.table(
        model,
        *keys.linear(f"{layer}.self_attn.qkv_proj", *qkv, bias=False),
        *keys.linear(f"{layer}.self_attn.o_proj", output, bias=False),
        *keys.linear(f"{layer}.mlp.gate_up_proj", *gate_up, bias=False),
        *keys.linear(f"{layer}.mlp.down_proj", down, bias=False),
    )


FAMILY = keys.Family("phi3", "Phi3", config_from_hf, config_to_hf, key_table)
