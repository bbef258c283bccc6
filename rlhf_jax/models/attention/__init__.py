"""Attention of tokens to the keys and values of a row, by several engines."""

from rlhf_jax.models.attention.engines import attend, attend_to, attend_xla
from rlhf_jax.models.attention.pages import (
    Pages,
    append_to_pages,
    attend_to_pages,
    ring,
)
from rlhf_jax.models.caches import Cached, Columns, KeyValue, append, quantise
from rlhf_jax.models.positions import AttentionMask, mask_of

__all__ = [
    "AttentionMask",
    "Cached",
    "Columns",
    "KeyValue",
    "Pages",
    "append",
    "append_to_pages",
    "attend",
    "attend_to",
    "attend_to_pages",
    "attend_xla",
    "mask_of",
    "quantise",
    "ring",
]
