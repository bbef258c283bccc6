"""What some checkpoints of Gemma 4 have beside attention and MLP, in every layer.

26B-A4B     a mixture of experts beside the MLP
E2B, E4B    embeddings of each layer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import Experts, ModelConfig
from rlhf_jax.models.families import keys
from rlhf_jax.models.families.options import fields

LAYER = "model.layers.{layer}"


def experts_from_hf(config: Mapping[str, Any]) -> Experts | None:
    """The mixture of a Gemma4Text `config.json`; None for a dense model."""
    if not fields.option(config, "enable_moe_block", False):
        return None
    return Experts(
        count=fields.required(config, "num_experts"),
        per_token=fields.required(config, "top_k_experts"),
        beside_width=fields.required(config, "moe_intermediate_size"),
    )


def experts_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The options that `experts_from_hf` reads back; {} for a dense model."""
    experts = model.experts
    if experts is None:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": experts.count,
        "top_k_experts": experts.per_token,
        "moe_intermediate_size": experts.beside_width,
    }


def expert_keys(model: ModelConfig) -> list[keys.Key]:
    """Router, norms, and one tensor [E, out, in] per matrix of all experts."""
    if model.experts is None:
        return []
    own = [
        keys.Key(theirs, tuple(f"layers/experts/{path}" for path in ours), "transposed")
        for theirs, ours in {
            f"{LAYER}.router.proj.weight": ("router/weight",),
            f"{LAYER}.experts.gate_up_proj": ("gate/kernel", "up/kernel"),
            f"{LAYER}.experts.down_proj": ("down/kernel",),
        }.items()
    ]
    own += [
        keys.Key(f"{LAYER}.{theirs}", (f"layers/{ours}",))
        for theirs, ours in {
            "router.scale": "experts/router/scale",
            "router.per_expert_scale": "experts/scale",
            "pre_feedforward_layernorm_2.weight": "experts_norm/scale",
            "post_feedforward_layernorm_1.weight": "dense_post_norm/scale",
            "post_feedforward_layernorm_2.weight": "experts_post_norm/scale",
        }.items()
    ]
    return own


def embedding_keys(model: ModelConfig) -> list[keys.Key]:
    """The embeddings of each layer, and what reads them."""
    if model.per_layer_width is None:
        return []
    table, mix = "model.embed_tokens_per_layer.weight", "embed/per_layer_mix"
    own = [keys.Key(table, ("embed/per_layer",), "vocabulary")]
    for theirs, ours in {
        "model.per_layer_model_projection": mix,
        f"{LAYER}.per_layer_input_gate": "layers/per_layer/gate",
        f"{LAYER}.per_layer_projection": "layers/per_layer/output",
    }.items():
        own += keys.linear(theirs, ours, bias=False)
    own += keys.norm("model.per_layer_projection_norm", mix, bias=False)
    after = f"{LAYER}.post_per_layer_input_norm"
    own += keys.norm(after, "layers/per_layer_norm", bias=False)
    return own
