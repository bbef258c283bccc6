"""Sliding windows in a Hugging Face config: which layers are local.

In every family a query at position q of a local layer sees the keys at positions k with
q - k < `sliding_window`: that many tokens, its own included (transformers 5,
`masking_utils.sliding_window_overlay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig

Local = Callable[[int], bool]  # whether a layer, from 0, is local

_LOCAL = {"sliding_attention": True, "full_attention": False}
_NAMES = {local: name for name, local in _LOCAL.items()}


def from_hf(
    model: ModelConfig,
    config: Mapping[str, Any],
    *,
    window: int | None,
    default: Local,
) -> ModelConfig:
    """The model with the windows of a config.json.

    Args:
      config: its `layer_types`, if any, say which layers are local.
      window: of local layers, in tokens; None if the config has switched it off.
      default: which layers are local in a config without `layer_types`.

    Raises:
      InputError: the decoder does not implement a kind of layer, or layers are local
        and have no window.
    """
    types = config.get("layer_types")
    if types is None:
        local = tuple(
            window is not None and default(i) for i in range(model.num_layers)
        )
    else:
        unknown = sorted(set(types) - set(_LOCAL))
        if unknown:
            raise InputError(
                f"config.json: expected layer_types of {' and '.join(_LOCAL)}, got "
                f"{', '.join(unknown)}; use another checkpoint"
            )
        local = tuple(_LOCAL[kind] for kind in types)
        if any(local) and window is None:
            raise InputError(
                "config.json: expected sliding_window in tokens, as layer_types name "
                "sliding_attention, got none (null, or use_sliding_window false); "
                "correct either"
            )
    if not any(local):
        window, local = None, ()
    return dataclasses.replace(model, sliding_window=window, local_layers=local)


def in_every_layer(model: ModelConfig, *, window: int | None) -> ModelConfig:
    """The model with a window, in tokens, in every layer; None is no window."""
    local = () if window is None else (True,) * model.num_layers
    return dataclasses.replace(model, sliding_window=window, local_layers=local)


def layer_types(model: ModelConfig) -> list[str]:
    """The option `layer_types` of a model."""
    return [_NAMES[model.is_local(layer)] for layer in range(model.num_layers)]
