"""OLMo 3 (arXiv:2512.13961): OLMo 2 with three local layers per global one.

Only the rotary positions of global layers may be scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, olmo2
from rlhf_jax.models.families.options import fields, rotary, windows

BASE = 500_000.0  # default rotary base of both kinds of layers


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of an Olmo3 `config.json`.

    Reads `rope_theta` and `rope_scaling`, or the `rope_parameters` of transformers 5,
    which have base and scaling per kind of layer.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    near, far = rotary.by_kind_of_layer(config)
    base = fields.option(config, "rope_theta", BASE)
    if base != BASE and near.get("rope_theta") is None:
        raise InputError(
            f"config.json: expected the base of local layers in "
            f"rope_parameters.sliding_attention.rope_theta, got rope_theta = {base:g} "
            f"alone, which transformers 4 takes for them, and 5 takes {BASE:g}; add it"
        )
    model = olmo2.decoder_from_hf(
        {
            **config,
            "rope_theta": base,
            "rope_parameters": far,
            "rope_scaling": None,
        },
        family="olmo3",
    )
    model = windows.from_hf(
        model,
        config,
        window=config.get("sliding_window", 4096),
        default=lambda layer: (layer + 1) % 4 != 0,
    )
    near_base = float(fields.option(near, "rope_theta", BASE))
    return dataclasses.replace(model, rope_local_theta=near_base)


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    options = olmo2.config_to_hf(model)
    scaling = options["rope_scaling"] or {"rope_type": "default"}
    near = {"rope_type": "default", "rope_theta": model.rope_local_theta}
    return options | {
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": model.rope_theta},
            "sliding_attention": near,
        },
        "sliding_window": model.sliding_window,
        "layer_types": windows.layer_types(model),
    }


FAMILY = keys.Family("olmo3", "Olmo3", config_from_hf, config_to_hf, olmo2.key_table)
