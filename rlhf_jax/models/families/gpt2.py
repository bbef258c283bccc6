"""GPT-2 (Radford et al. 2019): its Hugging Face config and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig, head_dim_of
from rlhf_jax.models.families import keys
from rlhf_jax.models.families.options import fields


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a GPT-2 `config.json`."""
    fields.only(
        config,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
    )
    hidden_size = fields.required(config, "n_embd")
    num_heads = fields.required(config, "n_head")
    inner = config.get("n_inner")
    return ModelConfig(
        family="gpt2",
        vocab_size=fields.required(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.required(config, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim_of(hidden_size, num_heads),
        intermediate_size=4 * hidden_size if inner is None else inner,
        max_positions=fields.required(config, "n_positions"),
        norm="layernorm",
        norm_eps=fields.option(config, "layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=fields.activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tied_head=fields.option(config, "tie_word_embeddings", True),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.intermediate_size,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": fields.ACTIVATIONS_TO_HF[model.activation],
        "tie_word_embeddings": model.tied_head,
    }


def key_table(model: ModelConfig) -> keys.Table:
    """GPT-2's names; its linear layers are Conv1D, [in, out] like ours."""
    layer = "transformer.h.{layer}"
    qkv = ("layers/attention/query", "layers/attention/key", "layers/attention/value")
    output = "layers/attention/output"
    up, down = "layers/mlp/up", "layers/mlp/down"
    head = keys.Key("lm_head.weight", ("head/kernel",), "vocabulary")
    return keys.Table(
        prefix="transformer.",
        keys=(
            keys.Key("transformer.wte.weight", ("embed/tokens",), "vocabulary"),
            keys.Key("transformer.wpe.weight", ("embed/positions",)),
            *keys.norm(f"{layer}.ln_1", "layers/attention_norm", bias=True),
            *keys.linear(f"{layer}.attn.c_attn", *qkv, bias=True, layout="same"),
            *keys.linear(f"{layer}.attn.c_proj", output, bias=True, layout="same"),
            *keys.norm(f"{layer}.ln_2", "layers/mlp_norm", bias=True),
            *keys.linear(f"{layer}.mlp.c_fc", up, bias=True, layout="same"),
            *keys.linear(f"{layer}.mlp.c_proj", down, bias=True, layout="same"),
            *keys.norm("transformer.ln_f", "final_norm", bias=True),
            *(() if model.tied_head else (head,)),
        ),
        ignored=(
            # The causal mask, which older checkpoints store.
            f"{layer}.attn.bias",
            f"{layer}.attn.masked_bias",
        ),
        tied=head.name if model.tied_head else None,
    )


FAMILY = keys.Family(
    "gpt2", "GPT2", config_from_hf, config_to_hf, key_table, causal_suffix="LMHeadModel"
)
