"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783): Hugging Face config and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import keys
from rlhf_jax.models.config import ModelConfig, RopeScaling


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Llama `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    hidden_size = keys.required(config, "hidden_size")
    num_heads = keys.required(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    rope_theta, rope_scaling = rope_from_hf(config)
    # Theirs is one option for all four projections.
    attention_bias = config.get("attention_bias", False)
    return ModelConfig(
        family="llama",
        vocab_size=keys.required(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=keys.required(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=hidden_size // num_heads if head_dim is None else head_dim,
        intermediate_size=keys.required(config, "intermediate_size"),
        max_positions=keys.required(config, "max_position_embeddings"),
        norm="rmsnorm",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        positions="rope",
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        activation=keys.activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", False),
        tied_head=config.get("tie_word_embeddings", False),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
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
        "hidden_act": keys.ACTIVATIONS_TO_HF[model.activation],
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tied_head,
        **rope_to_hf(model),
    }


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary positions.

    Reads `rope_theta` with `rope_scaling`, and the `rope_parameters` of transformers 5,
    which hold both.

    Raises:
      InputError: a kind of scaling that the decoder does not implement.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    keys.only(config, {"partial_rotary_factor": 1.0})
    keys.only(scaling, {"partial_rotary_factor": 1.0})
    given = (scaling.get("rope_theta"), config.get("rope_theta"), 10_000.0)
    theta = float(next(theta for theta in given if theta is not None))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", float(keys.required(scaling, "factor")))
        case "llama3":
            original = scaling.get("original_max_position_embeddings")
            return theta, RopeScaling(
                "llama3",
                float(keys.required(scaling, "factor")),
                float(keys.required(scaling, "low_freq_factor")),
                float(keys.required(scaling, "high_freq_factor")),
                keys.required(config, "max_position_embeddings")
                if original is None
                else original,
            )
    raise InputError(
        f"config.json: expected a rope_type of default, linear or llama3, got "
        f"{kind!r}; use another checkpoint"
    )


def rope_to_hf(model: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which transformers 4 and 5 both read."""
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {"rope_theta": model.rope_theta, "rope_scaling": written}


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names; its linear layers are [out, in]."""
    theirs, ours = "model.layers.{layer}.self_attn", "layers/attention"
    qkv_bias, output_bias = model.attention_bias, model.attention_output_bias
    mlp = "model.layers.{layer}.mlp"
    norm = "model.layers.{layer}.input_layernorm"
    mlp_norm = "model.layers.{layer}.post_attention_layernorm"
    head = keys.Key("lm_head.weight", ("head/kernel",), "vocabulary")
    return keys.Table(
        prefix="model.",
        keys=(
            keys.Key("model.embed_tokens.weight", ("embed/tokens",), "vocabulary"),
            *keys.norm(norm, "layers/attention_norm", bias=False),
            *keys.linear(f"{theirs}.q_proj", f"{ours}/query", bias=qkv_bias),
            *keys.linear(f"{theirs}.k_proj", f"{ours}/key", bias=qkv_bias),
            *keys.linear(f"{theirs}.v_proj", f"{ours}/value", bias=qkv_bias),
            *keys.linear(f"{theirs}.o_proj", f"{ours}/output", bias=output_bias),
            *keys.norm(mlp_norm, "layers/mlp_norm", bias=False),
            *keys.linear(f"{mlp}.gate_proj", "layers/mlp/gate", bias=model.mlp_bias),
            *keys.linear(f"{mlp}.up_proj", "layers/mlp/up", bias=model.mlp_bias),
            *keys.linear(f"{mlp}.down_proj", "layers/mlp/down", bias=model.mlp_bias),
            *keys.norm("model.norm", "final_norm", bias=False),
            *(() if model.tied_head else (head,)),
        ),
        ignored=(
            # Frequencies that follow from the config; older checkpoints store them.
            f"{theirs}.rotary_emb.inv_freq",
            "model.rotary_emb.inv_freq",
            *((head.name,) if model.tied_head else ()),
        ),
    )


FAMILY = keys.Family(
    name="llama",
    causal="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    key_table=key_table,
)
