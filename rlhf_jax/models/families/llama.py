"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783): Hugging Face config and names.

Many families name their options and tensors as Llama does, and use the functions here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig, head_dim_of
from rlhf_jax.models.families import keys
from rlhf_jax.models.families.options import fields, rotary

NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def decoder_from_hf(
    config: Mapping[str, Any],
    *,
    family: str,
    partial_rotary: bool = False,
    activation: str = "hidden_act",
) -> ModelConfig:
    """The decoder of the options that Llama and its descendants name alike.

    Args:
      partial_rotary: whether the family may rotate only part of a head.
      activation: name of the option that names the activation.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    hidden_size = fields.required(config, "hidden_size")
    num_heads = fields.required(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    head_dim = head_dim_of(hidden_size, num_heads) if head_dim is None else head_dim
    if not partial_rotary:
        fields.only(config, {"partial_rotary_factor": 1.0})
        fields.only(rotary.parameters(config), {"partial_rotary_factor": 1.0})
    rope_theta, rope_scaling = rotary.from_hf(config)
    # One option sets the biases of all four projections.
    attention_bias = fields.option(config, "attention_bias", False)
    return ModelConfig(
        family=family,
        vocab_size=fields.required(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.required(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.required(config, "intermediate_size"),
        max_positions=rotary.max_positions(config, rope_scaling),
        norm="rmsnorm",
        norm_eps=fields.option(config, "rms_norm_eps", 1e-6),
        positions="rope",
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rotary_dim=rotary.rotary_dim(config, head_dim=head_dim),
        activation=fields.activation(config, activation, "silu"),
        gated_mlp=True,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.option(config, "mlp_bias", False),
        tied_head=fields.option(config, "tie_word_embeddings", False),
    )


def decoder_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The options that `decoder_from_hf` reads back, except those of biases."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": fields.ACTIVATIONS_TO_HF[model.activation],
        "tie_word_embeddings": model.tied_head,
        **rotary.to_hf(model),
    }


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Llama `config.json`."""
    return decoder_from_hf(config, family="llama")


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return decoder_to_hf(model) | {
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
    }


def attention_keys(model: ModelConfig) -> tuple[keys.Key, ...]:
    """The projections of Llama's attention, and norms of query and key if any."""
    theirs, ours = "model.layers.{layer}.self_attn", "layers/attention"
    qkv_bias, output_bias = model.attention_bias, model.attention_output_bias
    norms = (
        *keys.norm(f"{theirs}.q_norm", f"{ours}/query_norm", bias=False),
        *keys.norm(f"{theirs}.k_norm", f"{ours}/key_norm", bias=False),
    )
    return (
        *keys.linear(f"{theirs}.q_proj", f"{ours}/query", bias=qkv_bias),
        *keys.linear(f"{theirs}.k_proj", f"{ours}/key", bias=qkv_bias),
        *keys.linear(f"{theirs}.v_proj", f"{ours}/value", bias=qkv_bias),
        *keys.linear(f"{theirs}.o_proj", f"{ours}/output", bias=output_bias),
        *(norms if model.query_key_norm else ()),
    )


def mlp_keys(model: ModelConfig) -> tuple[keys.Key, ...]:
    """Llama's gated MLP."""
    theirs, bias = "model.layers.{layer}.mlp", model.mlp_bias
    return (
        *keys.linear(f"{theirs}.gate_proj", "layers/mlp/gate", bias=bias),
        *keys.linear(f"{theirs}.up_proj", "layers/mlp/up", bias=bias),
        *keys.linear(f"{theirs}.down_proj", "layers/mlp/down", bias=bias),
    )


def table(
    model: ModelConfig,
    *projections: keys.Key,
    norms: Mapping[str, str] = NORMS,
) -> keys.Table:
    """Llama's names around the projections of a layer; linear layers are [out, in]."""
    layer = "model.layers.{layer}"
    head = keys.Key("lm_head.weight", ("head/kernel",), "vocabulary")
    return keys.Table(
        prefix="model.",
        keys=(
            keys.Key("model.embed_tokens.weight", ("embed/tokens",), "vocabulary"),
            *(
                key
                for theirs, ours in norms.items()
                for key in keys.norm(f"{layer}.{theirs}", f"layers/{ours}", bias=False)
            ),
            *projections,
            *keys.norm("model.norm", "final_norm", bias=False),
            *(() if model.tied_head else (head,)),
        ),
        ignored=(
            # Frequencies that follow from the config; older checkpoints store them.
            f"{layer}.self_attn.rotary_emb.inv_freq",
            "model.rotary_emb.inv_freq",
        ),
        tied=head.name if model.tied_head else None,
    )


def key_table(model: ModelConfig, *, norms: Mapping[str, str] = NORMS) -> keys.Table:
    """Llama's names, with these norms in a layer: {their name: ours}."""
    return table(model, *attention_keys(model), *mlp_keys(model), norms=norms)


FAMILY = keys.Family("llama", "Llama", config_from_hf, config_to_hf, key_table)
