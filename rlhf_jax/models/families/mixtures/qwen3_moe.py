"""Qwen 3, mixtures (arXiv:2505.09388): Qwen 3 with experts in place of every MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import Experts, ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.mixtures import mixtral
from rlhf_jax.models.families.options import fields, windows


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Qwen3Moe `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name, such as one
        for layers without experts.
    """
    fields.only(config, {"decoder_sparse_step": 1, "mlp_only_layers": []})
    width = fields.required(config, "moe_intermediate_size")
    # Unlike in Qwen 3, head_dim has no default, and windows begin at the first layer.
    model = llama.decoder_from_hf(
        {**config, "intermediate_size": width}, family="qwen3_moe"
    )
    count = config.get("num_experts", config.get("num_local_experts"))
    window = fields.option(config, "sliding_window", 4096)
    if not fields.option(config, "use_sliding_window", False):
        window = None
    return dataclasses.replace(
        windows.in_every_layer(model, window=window),
        query_key_norm=True,
        experts=Experts(
            count=fields.required({"num_experts": count}, "num_experts"),
            per_token=fields.required(config, "num_experts_per_tok"),
            normalised=fields.option(config, "norm_topk_prob", False),
        ),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    experts = model.experts
    assert experts is not None
    return {
        **llama.decoder_to_hf(model),
        "attention_bias": model.attention_bias,
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "moe_intermediate_size": model.intermediate_size,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names around a router and experts."""
    experts = mixtral.expert_keys(
        "mlp", gate="gate_proj", up="up_proj", down="down_proj"
    )
    return llama.table(model, *llama.attention_keys(model), *experts)


FAMILY = keys.Family(
    "qwen3_moe",
    "Qwen3Moe",
    config_from_hf,
    config_to_hf,
    key_table,
    reads=("num_experts", "num_local_experts"),
)
