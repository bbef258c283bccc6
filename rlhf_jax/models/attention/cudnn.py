"""Attention by cuDNN, on NVIDIA GPUs."""

from __future__ import annotations

import jax

from rlhf_jax.models.attention.cache import KeyValue

Array = jax.Array


def attend_cudnn(
    query: Array,
    keys_values: KeyValue,
    *,
    attend: Array,
    scale: float | None = None,
    softcap: float | None = None,
) -> Array:
    """`attend_to` by cuDNN's flash attention, which holds no logits, nor a softcap."""
    del softcap  # None: `ModelConfig` allows nothing else here
    key, value = (array.swapaxes(1, 2) for array in keys_values)
    y = jax.nn.dot_product_attention(
        query.swapaxes(1, 2),
        key,
        value,
        mask=attend[:, None],
        scale=scale,
        implementation="cudnn",
    )
    return y.swapaxes(1, 2)
