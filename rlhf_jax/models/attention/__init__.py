"""Attention of tokens to the keys and values of a row, by several engines."""

from rlhf_jax.models.attention.engines import attend, attend_to, attend_xla
from rlhf_jax.models.attention.pages import (
    Pages,
    append_to_pages,
    attend_to_pages,
    ring,
)

__all__ = [
    "Pages",
    "append_to_pages",
    "attend",
    "attend_to",
    "attend_to_pages",
    "attend_xla",
    "ring",
]
