"""`start`: the model that is trained, and how it is read, run and written."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_jax.checkpoints.hf import SaveDtype
from rlhf_jax.models.config import Attention, Remat
from rlhf_jax.models.lora import LoRA

Adapters = LoRA | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """How a model is read and run."""

    tokenizer: str | None = None
    """Tokenizer, a folder or hub id; None takes the one in --model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations; trained parameters stay float32."""
    remat: Remat = "none"
    """Activations of a layer that the backward pass rematerialises, to save memory."""
    attention: Attention = "auto"
    """Implementation of attention over whole sequences; auto takes the flash attention
    of the backend for long rows, and prints it at the start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(Compute):
    """How a model is trained and written."""

    lora: Adapters = None
    """Rank of LoRA adapters over a frozen base, as 16 or
    16,alpha=32,modules=attention/*+mlp/*. None trains every parameter."""
    save_dtype: SaveDtype | None = None
    """Dtype of OUT/model and OUT/adapter; None is that of most weights of --model, and
    float32 for a fresh model. Weights are trained in float32: 16 bits lose what is
    smaller than a 256th (bfloat16) or a 2048th (float16) of a weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start(Trained):
    """The model that is trained."""

    model: str
    """Model to start from, a checkpoint folder or hub id."""
