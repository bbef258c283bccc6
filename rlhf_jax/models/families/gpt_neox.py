"""GPT-NeoX (arXiv:2204.06745) and Pythia (arXiv:2304.01373): config and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig, head_dim_of
from rlhf_jax.models.families import keys
from rlhf_jax.models.families.options import fields, rotary


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a GPT-NeoX `config.json`."""
    hidden_size = fields.required(config, "hidden_size")
    num_heads = fields.required(config, "num_attention_heads")
    head_dim = head_dim_of(hidden_size, num_heads)
    rope_theta, rope_scaling = rotary.from_hf(config, theta="rotary_emb_base")
    attention_bias = fields.option(config, "attention_bias", True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=fields.required(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.required(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=fields.required(config, "intermediate_size"),
        max_positions=rotary.max_positions(config, rope_scaling),
        norm="layernorm",
        norm_eps=fields.option(config, "layer_norm_eps", 1e-5),
        positions="rope",
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rotary_dim=rotary.rotary_dim(
            config, head_dim=head_dim, share="rotary_pct", default=0.25
        ),
        activation=fields.activation(config, "hidden_act", "gelu"),
        gated_mlp=False,
        parallel_residual=fields.option(config, "use_parallel_residual", True),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=True,
        tied_head=fields.option(config, "tie_word_embeddings", False),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_positions,
        "layer_norm_eps": model.norm_eps,
        "hidden_act": fields.ACTIVATIONS_TO_HF[model.activation],
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": model.attention_bias,
        "tie_word_embeddings": model.tied_head,
        "rotary_pct": rotary.share(model),
        **rotary.to_hf(model, theta="rotary_emb_base"),
    }


def key_table(model: ModelConfig) -> keys.Table:
    """GPT-NeoX's names; query, key and value alternate by head in one tensor."""
    layer = "gpt_neox.layers.{layer}"
    attention, mlp = f"{layer}.attention", f"{layer}.mlp"
    qkv = ("layers/attention/query", "layers/attention/key", "layers/attention/value")
    output, bias = "layers/attention/output", model.attention_bias
    mlp_norm = f"{layer}.post_attention_layernorm"
    head = keys.Key("embed_out.weight", ("head/kernel",), "vocabulary")
    return keys.Table(
        prefix="gpt_neox.",
        keys=(
            keys.Key("gpt_neox.embed_in.weight", ("embed/tokens",), "vocabulary"),
            *keys.norm(f"{layer}.input_layernorm", "layers/attention_norm", bias=True),
            *keys.linear(
                f"{attention}.query_key_value",
                *qkv,
                bias=bias,
                head_dim=model.head_dim,
            ),
            *keys.linear(f"{attention}.dense", output, bias=bias),
            *keys.norm(mlp_norm, "layers/mlp_norm", bias=True),
            *keys.linear(f"{mlp}.dense_h_to_4h", "layers/mlp/up", bias=True),
            *keys.linear(f"{mlp}.dense_4h_to_h", "layers/mlp/down", bias=True),
            *keys.norm("gpt_neox.final_layer_norm", "final_norm", bias=True),
            *(() if model.tied_head else (head,)),
        ),
        ignored=(
            # The causal mask and the frequencies, which older checkpoints store.
            f"{attention}.bias",
            f"{attention}.masked_bias",
            f"{attention}.rotary_emb.inv_freq",
        ),
        tied=head.name if model.tied_head else None,
    )


FAMILY = keys.Family("gpt_neox", "GPTNeoX", config_from_hf, config_to_hf, key_table)
