"""Divergences of the policy from the reference, and how they act."""

from rlhf_jax.functional.kl.estimators import Direction, exact, k1, k2, k3, top_k
from rlhf_jax.functional.kl.hidden_states import (
    exact_from_hidden,
    jensen_shannon_from_hidden,
    top_k_from_hidden,
)
from rlhf_jax.functional.kl.mixtures import jensen_shannon

__all__ = [
    "Direction",
    "exact",
    "exact_from_hidden",
    "jensen_shannon",
    "jensen_shannon_from_hidden",
    "k1",
    "k2",
    "k3",
    "top_k",
    "top_k_from_hidden",
]
