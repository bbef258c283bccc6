"""Checkpoints as shapes, for `jax.eval_shape` of a build: nothing is read or allocated.

Under `jax.eval_shape` the zeros are shapes alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.checkpoints import hf
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import memory_check
from rlhf_jax.roles import critic

Params = Any


def params(model: ModelConfig) -> Params:
    """Parameters of a decoder, all 0."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), memory_check.shapes_of(model)
    )


def start(model: ModelConfig, *, backend: str) -> Pretrained:
    """A checkpoint of that shape, without parameters or a tokenizer."""
    nothing: Any = None
    return Pretrained(
        model, params=None, tokenizer=nothing, stop_ids=(), backend=backend
    )


def model_of(path: str) -> ModelConfig:
    """The shape of a checkpoint, or of a known name.

    Raises:
      InputError: there is no such checkpoint.
    """
    from rlhf_jax.models.families import registry

    return registry.KNOWN.get(path) or hf.model_config(path)


def load(path: str, **_: Any) -> tuple[ModelConfig, Params]:
    """As `hf.load`, by the small files of a checkpoint."""
    model = model_of(path)
    return model, params(model)


def load_reward(path: str, **_: Any) -> tuple[ModelConfig, Params]:
    """As `hf.load_reward`, by the small files of a checkpoint."""
    model, trunk = load(path)
    return model, critic.from_policy(trunk, model=model)
