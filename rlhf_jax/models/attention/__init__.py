"""Attention of tokens to the keys and values of a row, by several engines."""

from rlhf_jax.models.attention.cache import KeyValue, append
from rlhf_jax.models.attention.cudnn import attend_cudnn
from rlhf_jax.models.attention.xla import attend_to

__all__ = ["KeyValue", "append", "attend_cudnn", "attend_to"]
