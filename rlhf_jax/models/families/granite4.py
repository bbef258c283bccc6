"""Granite 4 models with attention in every layer: Granite 3 with a fused MLP.

Other models of its `model_type`, granitemoehybrid, have Mamba layers or experts and are
rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import granite, keys, llama
from rlhf_jax.models.families.options import fields

ATTENTION = ("attention", "full_attention")  # as transformers 4 and 5 name it


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a GraniteMoeHybrid `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    # transformers' defaults are eight experts, and only Mamba layers.
    fields.required(config, "num_local_experts")
    kinds = config.get("layers_block_type") or fields.required(config, "layer_types")
    fields.check({"layer_types": kinds})
    others = sorted(set(kinds) - {*ATTENTION})
    if others:
        raise InputError(
            f"config.json: expected layer_types of {ATTENTION[0]} alone, got "
            f"{', '.join(others)}; use a dense checkpoint (350m, 1b, micro)"
        )
    fields.only(config, {"num_local_experts": 0, "mlp_bias": False})
    width = fields.required(config, "shared_intermediate_size")
    model = granite.decoder_from_hf(
        {**config, "intermediate_size": width}, family="granitemoehybrid"
    )
    if config.get("position_embedding_type") is not None:
        fields.only(config, {"position_embedding_type": "rope"})
        return model
    return dataclasses.replace(model, unrotated_layers=(True,) * model.num_layers)


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    options = granite.config_to_hf(model)
    del options["mlp_bias"]  # transformers' config has no such option
    return options | {
        "shared_intermediate_size": model.intermediate_size,
        "position_embedding_type": None if any(model.unrotated_layers) else "rope",
        "layer_types": [ATTENTION[0]] * model.num_layers,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        # There are no such layers, but transformers checks the option.
        "mamba_n_heads": 1,
    }


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names, except those of the MLP."""
    theirs, ours = "model.layers.{layer}.shared_mlp", "layers/mlp"
    gate_up = (f"{ours}/gate", f"{ours}/up")
    return llama.table(
        model,
        *llama.attention_keys(model),
        *keys.linear(f"{theirs}.input_linear", *gate_up, bias=False),
        *keys.linear(f"{theirs}.output_linear", f"{ours}/down", bias=False),
    )


FAMILY = keys.Family(
    "granitemoehybrid", "GraniteMoeHybrid", config_from_hf, config_to_hf, key_table
)
