"""Reads and writes Hugging Face checkpoints: config.json and safetensors, no torch.

    model, params = hf.load("gpt2", dtype="float32")
    hf.save("out", model, params, tokenizer=tokenizer)

A causal language model is (model, params). A reward model is a sequence-classification
checkpoint with one label, (model, {"trunk": params without a head, "score": ...}).
"""

from rlhf_jax.checkpoints.hf.casting import (
    SAVE_DTYPES,
    SaveDtype,
    check_dtype,
    rounded_reward,
)
from rlhf_jax.checkpoints.hf.layout import FAMILIES, UNSUPPORTED, PathLike
from rlhf_jax.checkpoints.hf.reading import (
    load,
    load_reward,
    model_config,
    stop_ids,
    stored_dtype,
)
from rlhf_jax.checkpoints.hf.writing import MAX_SHARD_BYTES, save, save_reward

__all__ = [
    "FAMILIES",
    "MAX_SHARD_BYTES",
    "SAVE_DTYPES",
    "UNSUPPORTED",
    "PathLike",
    "SaveDtype",
    "check_dtype",
    "load",
    "load_reward",
    "model_config",
    "rounded_reward",
    "save",
    "save_reward",
    "stop_ids",
    "stored_dtype",
]
