"""Divergences of the policy from the reference, and the penalties made of them.

Divergences of whole distributions are loaded on first use: most runs need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_jax.functional.kl.estimators import Direction, exact, k1, k2, k3, top_k

if TYPE_CHECKING:
    from rlhf_jax.functional.kl.hidden_states import (
        exact_from_hidden,
        head_from_hidden,
        jensen_shannon_from_hidden,
    )
    from rlhf_jax.functional.kl.mixtures import jensen_shannon

__all__ = [
    "Direction",
    "exact",
    "exact_from_hidden",
    "head_from_hidden",
    "jensen_shannon",
    "jensen_shannon_from_hidden",
    "k1",
    "k2",
    "k3",
    "top_k",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"{__name__} has no name {name!r}")
    from rlhf_jax.functional.kl import hidden_states, mixtures

    return getattr(mixtures if name == "jensen_shannon" else hidden_states, name)
