"""Sliding windows in a Hugging Face config: which layers see only what is near.

In every family a query at position q of a local layer sees the keys at k with
q - k < `sliding_window`: that many tokens, its own included (transformers 5,
`masking_utils.sliding_window_overlay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig

Local = Callable[[int], bool]  # of a layer, from 0, whether it is local

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
      config: whose `layer_types` say which layers are local, if it has any.
      window: of local layers, in tokens; None where the config has switched it off.
      default: which layers are local in a config without `layer_types`.

    Raises:
      InputError: a kind of layer that the decoder does not implement.
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


def layer_types(model: ModelConfig) -> list[str]:
    """The option of that name."""
    return [_NAMES[model.is_local(layer)] for layer in range(model.num_layers)]
