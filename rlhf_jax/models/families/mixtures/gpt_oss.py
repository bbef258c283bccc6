"""gpt-oss (arXiv:2508.10925): attention sinks, alternating windows, clamped experts.

Gate and up of all experts of a layer are one tensor, with alternating columns. Weights
in MXFP4 (`checkpoints/hf/mxfp4.py`) are read as bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import Experts, ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields, rotary, windows

# For options missing from config.json.
DEFAULTS = {"rope_theta": 150_000.0, "head_dim": 64, "rms_norm_eps": 1e-5}
DEFAULTS |= {"attention_bias": True}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a GptOss `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    quantised = fields.option(config, "quantization_config", {})
    fields.only(quantised, {"quant_method": "mxfp4"})
    if not rotary.parameters(config):  # transformers' default is that of the 20b
        fields.required(config, "rope_scaling")
    model = llama.decoder_from_hf(fields.filled(config, DEFAULTS), family="gpt_oss")
    model = windows.from_hf(
        dataclasses.replace(model, mlp_bias=True, sinks=True),
        config,
        window=fields.option(config, "sliding_window", 128),
        default=lambda layer: layer % 2 == 0,
    )
    per_token = config.get("num_experts_per_tok", config.get("experts_per_token"))
    experts = Experts(
        count=fields.required(config, "num_local_experts"),
        per_token=fields.option({"k": per_token}, "k", 4),
        router_bias=True,
        gate_limit=float(fields.option(config, "swiglu_limit", 7.0)),
        gate_scale=float(fields.option(config, "swiglu_alpha", 1.702)),
    )
    return dataclasses.replace(model, experts=experts)


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    experts = model.experts
    assert experts is not None
    options = llama.decoder_to_hf(model)
    if options["rope_scaling"] is None:  # transformers' default is yarn
        options["rope_scaling"] = {"rope_type": "default"}
    return options | {
        "attention_bias": model.attention_bias,
        "sliding_window": model.sliding_window,
        "layer_types": windows.layer_types(model),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "swiglu_limit": experts.gate_limit,
        "swiglu_alpha": experts.gate_scale,
    }


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names around sinks, the router, and one tensor per matrix of experts."""
    theirs, ours = "model.layers.{layer}", "layers/experts"
    gate_up = (f"{ours}/gate", f"{ours}/up")
    router, experts = f"{theirs}.mlp.router", f"{theirs}.mlp.experts"

    def fused(name: str, paths: tuple[str, ...], turns: int | None) -> list[keys.Key]:
        """Keys of matrices [E, in, out] and biases [E, out]."""
        parts = {"": "kernel", "_bias": "bias"}
        return [
            keys.Key(
                f"{experts}.{name}{suffix}",
                tuple(f"{path}/{leaf}" for path in paths),
                "same",
                turns,
            )
            for suffix, leaf in parts.items()
        ]

    return llama.table(
        model,
        *llama.attention_keys(model),
        keys.Key(f"{theirs}.self_attn.sinks", ("layers/attention/sinks",)),
        keys.Key(f"{router}.weight", (f"{ours}/router/weight",), "transposed"),
        keys.Key(f"{router}.bias", (f"{ours}/router/bias",)),
        *fused("gate_up_proj", gate_up, 1),
        *fused("down_proj", (f"{ours}/down",), None),
    )


FAMILY = keys.Family(
    "gpt_oss",
    "GptOss",
    config_from_hf,
    config_to_hf,
    key_table,
    reads=("num_local_experts", "num_experts", "quantization_config"),
)
