"""Gemma 4, the dense language models: Gemma 3 with other heads in global layers.

    local layers     a sliding window, heads of `head_dim`
    global layers    heads of `global_head_dim`, of which a share of the pairs rotates;
                     in 31B values are the projected keys
    E2B, E4B         an embedding of every token for each layer; the last layers read
                     the keys and values of earlier ones

Norms multiply by their weight, queries are not scaled beside their norm, and values are
normed without a weight. Each layer multiplies what it returns by `layer_scalar`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import (
    ATTENTIONS,
    MLPS,
    GlobalHeads,
    ModelConfig,
    RopeScaling,
)
from rlhf_jax.models.families import gemma2, keys, llama
from rlhf_jax.models.families.options import fields, rotary, windows

# Where a config.json is silent.
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "hidden_size_per_layer_input": 256,
}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Gemma4Text `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    fields.only(config, {"enable_moe_block": False})
    # Of texts alone: "vision" is about the tokens of images.
    fields.only(config, {"use_bidirectional_attention": "vision"})
    config = fields.filled(config, DEFAULTS)
    near, far = rotary.by_kind_of_layer(
        fields.filled(config, {"rope_parameters": ROPE})
    )
    fields.only(far, {"rope_type": "proportional"})
    bases = {"rope_theta": fields.required(far, "rope_theta"), "rope_parameters": None}
    model = llama.decoder_from_hf(
        {**config, **bases, "rope_scaling": None},
        family="gemma4_text",
        activation="hidden_activation",
    )
    types = config.get("layer_types")
    model = windows.from_hf(
        model,
        # The last is global whatever they say, as in transformers.
        config if types is None else {"layer_types": [*types[:-1], "full_attention"]},
        window=fields.option(config, "sliding_window", 512),
        default=lambda n: (n + 1) % 6 != 0 and n != model.num_layers - 1,
    )
    width = config["hidden_size_per_layer_input"]
    if width:
        fields.only(config, {"vocab_size_per_layer_input": model.vocab_size})
    return dataclasses.replace(
        model,
        rope_scaling=RopeScaling(
            "proportional",
            float(fields.option(far, "factor", 1.0)),
            share=float(fields.option(far, "partial_rotary_factor", 1.0)),
        ),
        rope_local_theta=float(fields.required(near, "rope_theta")),
        global_heads=_global_heads(config, model),
        query_key_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scale=True,
        query_scale=1.0,
        embed_scale=model.hidden_size**0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        shared_layers=fields.option(config, "num_kv_shared_layers", 0),
        wide_shared_mlp=fields.option(config, "use_double_wide_mlp", False),
        per_layer_width=width or None,
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    options = gemma2.decoder_to_hf(model)
    for other in ("query_pre_attn_scalar", "rope_theta", "rope_scaling"):
        del options[other]
    heads, scaling = model.global_heads, model.rope_scaling
    assert heads is not None
    assert scaling is not None
    far = {"partial_rotary_factor": scaling.share, "rope_theta": model.rope_theta}
    near = {"rope_theta": model.rope_local_theta}
    if scaling.factor != 1.0:
        far["factor"] = scaling.factor
    if model.per_layer_width is not None:
        options["vocab_size_per_layer_input"] = model.vocab_size
    shared = heads.num_kv_heads if heads.keys_as_values else None
    return options | {
        "rope_parameters": {
            "sliding_attention": ROPE["sliding_attention"] | near,
            "full_attention": ROPE["full_attention"] | far,
        },
        "global_head_dim": heads.head_dim,
        "num_global_key_value_heads": shared,
        "attention_k_eq_v": heads.keys_as_values,
        "final_logit_softcapping": model.logit_softcap,
        "hidden_size_per_layer_input": model.per_layer_width or 0,
        "num_kv_shared_layers": model.shared_layers,
        "use_double_wide_mlp": model.wide_shared_mlp,
    }


def _global_heads(config: Mapping[str, Any], model: ModelConfig) -> GlobalHeads:
    """Of options of their own, or of the list by layer that transformers 5 writes."""
    same, by_layer = (
        config.get("attention_k_eq_v") is True,
        config.get("per_layer_config"),
    )
    if by_layer is None:
        others = config.get("num_global_key_value_heads") if same else None
        heads = model.num_kv_heads if others is None else others
        return GlobalHeads(config["global_head_dim"], heads, same)
    own = {"head_dim": model.head_dim, "num_key_value_heads": model.num_kv_heads}
    listed = [own | by_layer.get(str(layer), {}) for layer in range(model.num_layers)]
    for one in listed:
        fields.check(one, inside="per_layer_config.")
    expected = [own if model.is_local(n) else listed[-1] for n in range(len(listed))]
    if listed != expected or listed[-1].keys() != own.keys():
        raise InputError(
            "config.json: expected per_layer_config of one head_dim and one "
            "num_key_value_heads for all layers of full_attention, got others; use "
            "another checkpoint"
        )
    return GlobalHeads(*(listed[-1][name] for name in own), same)


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names, of layers of every kind, and those of embeddings by layer."""
    layer = "model.layers.{layer}"
    attention = (_of_kind(llama.attention_keys, name, model) for name in ATTENTIONS)
    mlp = (_of_kind(llama.mlp_keys, name, model) for name in MLPS)
    table = "model.embed_tokens_per_layer.weight"
    own = [keys.Key(table, ("embed/per_layer",), "vocabulary")]
    for theirs, ours in {
        "model.per_layer_model_projection": "embed/per_layer_mix",
        f"{layer}.per_layer_input_gate": "layers/per_layer/gate",
        f"{layer}.per_layer_projection": "layers/per_layer/output",
    }.items():
        own += keys.linear(theirs, ours, bias=False)
    own += keys.norm(
        "model.per_layer_projection_norm", "embed/per_layer_mix", bias=False
    )
    after = f"{layer}.post_per_layer_input_norm"
    own += keys.norm(after, "layers/per_layer_norm", bias=False)
    named = llama.table(
        model,
        *(key for of_kind in (*attention, *mlp) for key in of_kind),
        keys.Key(f"{layer}.layer_scalar", ("layers/layer_scale",)),
        *(own if model.per_layer_width else ()),
        norms=gemma2.NORMS,
    )
    if not model.shared_layers:
        return named
    # Published files have them of layers that read others', which nothing reads.
    unread = ("k_proj", "v_proj", "k_norm")
    names = tuple(f"{layer}.self_attn.{name}.weight" for name in unread)
    return dataclasses.replace(named, ignored=(*named.ignored, *names))


def _of_kind(named: Any, module: str, model: ModelConfig) -> list[keys.Key]:
    """The keys of a module of that name, in the layers that have it."""
    layers = model.layers_of(module)
    if not layers:
        return []
    own, usual = model.at(layers[0]), module.rpartition("_")[2]
    missing = {"key", "value", "key_norm"} if module.startswith("shared") else set()
    missing |= {"value"} if own.keys_as_values else set()
    return [
        dataclasses.replace(
            key,
            paths=tuple(
                path.replace(f"/{usual}/", f"/{module}/") for path in key.paths
            ),
            layers=layers,
        )
        for key in named(own)
        if key.paths[0].split("/")[2] not in missing
    ]


FAMILY = keys.Family(
    "gemma4_text",
    "Gemma4",
    config_from_hf,
    config_to_hf,
    key_table,
    classifier_suffix="TextForSequenceClassification",
)
