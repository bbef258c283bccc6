"""Mixtral (arXiv:2401.04088): Mistral with eight experts in place of every MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import Experts, ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields, windows


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Mixtral `config.json`."""
    defaults = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
    model = windows.in_every_layer(
        llama.decoder_from_hf(fields.filled(config, defaults), family="mixtral"),
        window=config.get("sliding_window"),
    )
    experts = Experts(
        count=fields.option(config, "num_local_experts", 8),
        per_token=fields.option(config, "num_experts_per_tok", 2),
    )
    return dataclasses.replace(model, experts=experts)


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    experts = model.experts
    assert experts is not None
    return llama.decoder_to_hf(model) | {
        "sliding_window": model.sliding_window,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names around a router and experts."""
    experts = expert_keys("block_sparse_moe", gate="w1", up="w3", down="w2")
    return llama.table(model, *llama.attention_keys(model), *experts)


def expert_keys(block: str, *, gate: str, up: str, down: str) -> tuple[keys.Key, ...]:
    """The router of a block of that name, and one tensor for each expert's matrix."""
    theirs, ours = f"model.layers.{{layer}}.{block}", "layers/experts"
    expert = f"{theirs}.experts.{{expert}}"
    return (
        keys.Key(f"{theirs}.gate.weight", (f"{ours}/router/weight",), "transposed"),
        *keys.linear(f"{expert}.{gate}", f"{ours}/gate", bias=False),
        *keys.linear(f"{expert}.{up}", f"{ours}/up", bias=False),
        *keys.linear(f"{expert}.{down}", f"{ours}/down", bias=False),
    )


FAMILY = keys.Family(
    "mixtral",
    "Mixtral",
    config_from_hf,
    config_to_hf,
    key_table,
    reads=("num_local_experts", "num_experts"),
)
