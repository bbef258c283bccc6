"""Qwen 3.5, the dense language model: three DeltaNet layers per layer of attention.

    linear_attention    `delta_net.py`
    full_attention      as in Qwen 3, but its output is multiplied by the sigmoid of a
                        gate, and only a part of each head rotates

Norms are stored as their difference from 1, except the norm of a DeltaNet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import DeltaNet, ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields, rotary

KINDS = {"linear_attention": True, "full_attention": False}  # True: recurrent
SHAPE = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
# Where a config.json is silent.
DEFAULTS = dict(zip(SHAPE.values(), (16, 32, 128, 128, 4), strict=True))
DEFAULTS |= {"head_dim": 256, "partial_rotary_factor": 0.25}
DEFAULTS |= {"full_attention_interval": 4}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Qwen3_5Text `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    fields.only(config, {"mlp_bias": False, "attn_output_gate": True})
    options = fields.filled(config, DEFAULTS)
    model = llama.decoder_from_hf(options, family="qwen3_5_text", partial_rotary=True)
    period = options["full_attention_interval"]
    kinds = fields.option(
        config,
        "layer_types",
        [list(KINDS)[(i + 1) % period == 0] for i in range(model.num_layers)],
    )
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or len(kinds) != model.num_layers:
        raise InputError(
            f"config.json: expected layer_types of {' and '.join(KINDS)}, one for each "
            f"of {model.num_layers} layers, got {len(kinds)} with "
            f"{', '.join(unknown) or 'no others'}; use another checkpoint"
        )
    recurrent = tuple(KINDS[kind] for kind in kinds)
    shape = DeltaNet(**{ours: options[theirs] for ours, theirs in SHAPE.items()})
    return dataclasses.replace(
        model,
        norm_from_one=True,
        query_key_norm=True,
        output_gate=True,
        delta_net=shape if any(recurrent) else None,
        recurrent_layers=recurrent if any(recurrent) else (),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    options = llama.decoder_to_hf(model)
    scaling = options.pop("rope_scaling") or {"rope_type": "default"}
    kinds = {recurrent: kind for kind, recurrent in KINDS.items()}
    share = rotary.share(model)
    written = options | {
        "attention_bias": model.attention_bias,
        "rope_parameters": {
            **scaling,
            "rope_theta": model.rope_theta,
            "partial_rotary_factor": share,
        },
        "partial_rotary_factor": share,
        "layer_types": [kinds[model.is_recurrent(i)] for i in range(model.num_layers)],
    }
    if model.delta_net is None:
        return written
    sizes = dataclasses.asdict(model.delta_net)
    return written | {theirs: sizes[ours] for ours, theirs in SHAPE.items()}


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names around attention and DeltaNets."""
    projections = *_attention_keys(model), *_delta_net_keys(model)
    return llama.table(model, *projections, *llama.mlp_keys(model))


def _attention_keys(model: ModelConfig) -> tuple[keys.Key, ...]:
    """As in Qwen 3, with the gate of each head after its query in one tensor."""
    theirs, ours = "model.layers.{layer}.self_attn.q_proj", "layers/attention"
    query, *others = (
        key
        for key in llama.attention_keys(model)
        if key.paths != (f"{ours}/query/bias",)
    )
    both = keys.linear(
        theirs,
        f"{ours}/query",
        f"{ours}/gate",
        bias=model.attention_bias,
        head_dim=model.head_dim,
    )
    assert query.name == f"{theirs}.weight"
    return keys.in_layers(model.layers_of("attention"), *both, *others)


def _delta_net_keys(model: ModelConfig) -> tuple[keys.Key, ...]:
    if model.delta_net is None:
        return ()
    theirs, ours = "model.layers.{layer}.linear_attn", "layers/delta_net"
    mixed = [f"{ours}/{name}" for name in ("query", "key", "value")]
    taps = tuple(f"{path}_taps" for path in mixed)
    return keys.in_layers(
        model.layers_of("delta_net"),
        *keys.linear(f"{theirs}.in_proj_qkv", *mixed, bias=False),
        *keys.linear(f"{theirs}.in_proj_z", f"{ours}/gate", bias=False),
        *keys.linear(f"{theirs}.in_proj_b", f"{ours}/beta", bias=False),
        *keys.linear(f"{theirs}.in_proj_a", f"{ours}/decay", bias=False),
        *keys.linear(f"{theirs}.out_proj", f"{ours}/output", bias=False),
        keys.Key(f"{theirs}.conv1d.weight", taps, "taps"),
        keys.Key(f"{theirs}.A_log", (f"{ours}/log_rate",)),
        keys.Key(f"{theirs}.dt_bias", (f"{ours}/decay_bias",)),
        keys.Key(f"{theirs}.norm.weight", (f"{ours}/norm_scale",)),
    )


FAMILY = keys.Family(
    "qwen3_5_text",
    "Qwen3_5",
    config_from_hf,
    config_to_hf,
    key_table,
    classifier_suffix="TextForSequenceClassification",
)
