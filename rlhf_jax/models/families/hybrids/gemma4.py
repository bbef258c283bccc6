"""Gemma 4, the language models: Gemma 3 with other heads in global layers.

    local layers     a sliding window, heads of `head_dim`
    global layers    heads of `global_head_dim`; values are the projected keys in 31B
                     and 26B-A4B
    E2B, E4B         embeddings of each layer; the last ones read keys of earlier ones
    26B-A4B          experts beside the MLP of every layer (`gemma4_parts.py`)

Norms multiply by their weight, queries are not scaled beside their norm, and values are
normed without a weight. Each layer multiplies what it returns by `layer_scalar`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ATTENTIONS, GlobalHeads, ModelConfig, RopeScaling
from rlhf_jax.models.families import gemma2, gemma3, keys, llama
from rlhf_jax.models.families.hybrids import gemma4_parts
from rlhf_jax.models.families.options import fields, rotary, windows

# Where a config.json is silent.
DEFAULTS = gemma2.DEFAULTS | gemma3.DEFAULTS
DEFAULTS |= {"vocab_size": 262_144, "sliding_window": 512, "global_head_dim": 512}
DEFAULTS |= {"hidden_size_per_layer_input": 256}
NEAR = {"rope_type": "default", "rope_theta": 1e4}
FAR = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Gemma4Text `config.json`.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    # Of texts alone: "vision" is about the tokens of images.
    fields.only(config, {"use_bidirectional_attention": "vision"})
    rope = {"sliding_attention": NEAR, "full_attention": FAR}
    config = fields.filled(config, DEFAULTS | {"rope_parameters": rope})
    near, far = rotary.by_kind_of_layer(config)
    fields.only(far, {"rope_type": "proportional"})
    base = {"rope_theta": fields.required(far, "rope_theta")}
    model = llama.decoder_from_hf(
        config | base | {"rope_parameters": None, "rope_scaling": None},
        family="gemma4_text",
        activation="hidden_activation",
    )
    types = config.get("layer_types")
    model = windows.from_hf(
        model,
        # transformers, too, makes the last layer global in any case.
        config if types is None else {"layer_types": [*types[:-1], "full_attention"]},
        window=config["sliding_window"],
        default=lambda n: (n + 1) % 6 != 0 and n != model.num_layers - 1,
    )
    width = config["hidden_size_per_layer_input"] or None
    if width is not None:
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
        per_layer_width=width,
        experts=gemma4_parts.experts_from_hf(config),
    )


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    options = gemma2.decoder_to_hf(model)
    for other in ("query_pre_attn_scalar", "rope_theta", "rope_scaling"):
        del options[other]
    heads, scaling = model.global_heads, model.rope_scaling
    assert heads is not None
    assert scaling is not None
    near = NEAR | {"rope_theta": model.rope_local_theta}
    far = FAR | {"rope_theta": model.rope_theta}
    far |= {"partial_rotary_factor": scaling.share}
    far |= {} if scaling.factor == 1.0 else {"factor": scaling.factor}
    if model.per_layer_width is not None:
        options["vocab_size_per_layer_input"] = model.vocab_size
    options |= gemma4_parts.experts_to_hf(model)
    return options | {
        "rope_parameters": {"sliding_attention": near, "full_attention": far},
        "global_head_dim": heads.head_dim,
        "num_global_key_value_heads": (
            heads.num_kv_heads if heads.keys_as_values else None
        ),
        "attention_k_eq_v": heads.keys_as_values,
        "final_logit_softcapping": model.logit_softcap,
        "hidden_size_per_layer_input": model.per_layer_width or 0,
        "num_kv_shared_layers": model.shared_layers,
        "use_double_wide_mlp": model.wide_shared_mlp,
    }


def _global_heads(config: Mapping[str, Any], model: ModelConfig) -> GlobalHeads:
    """Of options of their own, or of the list by layer that transformers 5 writes."""
    same = fields.option(config, "attention_k_eq_v", False)
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        others = config.get("num_global_key_value_heads") if same else None
        heads = model.num_kv_heads if others is None else others
        return GlobalHeads(config["global_head_dim"], heads, same)
    own = {"head_dim": model.head_dim, "num_key_value_heads": model.num_kv_heads}
    for one in by_layer.values():
        fields.check({"per_layer_config": one})
        fields.check(one, inside="per_layer_config.")
    # transformers pads numbers with zeros: "05" of 35 layers.
    named = {layer.lstrip("0"): one for layer, one in by_layer.items()}
    numbers = (str(layer).lstrip("0") for layer in range(model.num_layers))
    listed = [own | named.get(layer, {}) for layer in numbers]
    expected = [own if model.is_local(n) else listed[-1] for n in range(len(listed))]
    if listed != expected or listed[-1].keys() != own.keys():
        raise InputError(
            "config.json: expected per_layer_config of one head_dim and one "
            "num_key_value_heads in full_attention, got others; use another checkpoint"
        )
    head_dim, heads = listed[-1].values()
    return GlobalHeads(head_dim, heads, same)


def key_table(model: ModelConfig) -> keys.Table:
    """Llama's names, of layers of every kind, and those of `gemma4_parts.py`."""
    layer = gemma4_parts.LAYER
    own = [key for name in ATTENTIONS for key in _of(name, llama.attention_keys, model)]
    own += [key for n in ("mlp", "shared_mlp") for key in _of(n, llama.mlp_keys, model)]
    own += [keys.Key(f"{layer}.layer_scalar", ("layers/layer_scale",))]
    own += gemma4_parts.embedding_keys(model) + gemma4_parts.expert_keys(model)
    named = llama.table(model, *own, norms=gemma2.NORMS)
    if not model.shared_layers:
        return named
    # Published files have them of layers that read others', which nothing reads.
    unread = (
        f"{layer}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")
    )
    return dataclasses.replace(named, ignored=(*named.ignored, *unread))


def _of(module: str, named: Any, model: ModelConfig) -> list[keys.Key]:
    """The keys of a module of that name, in the layers that have it."""
    layers, usual = model.layers_of(module), f"/{module.rpartition('_')[2]}/"
    if not layers:
        return []
    kind = model.at(layers[0])
    missing = {"key", "value", "key_norm"} if module.startswith("shared") else set()
    missing |= {"value"} if kind.keys_as_values else set()
    return [
        dataclasses.replace(
            key,
            paths=tuple(path.replace(usual, f"/{module}/") for path in key.paths),
            layers=layers,
        )
        for key in named(kind)
        if key.paths[0].split("/")[2] not in missing
    ]


FAMILY = keys.Family(
    *("gemma4_text", "Gemma4", config_from_hf, config_to_hf, key_table),
    reads=("num_experts",),
)
