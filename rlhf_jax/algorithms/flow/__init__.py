"""The steps that all policy gradients share, from prompts to scores."""

from rlhf_jax.algorithms.flow import ledger, objective, rollout, score, shaping

__all__ = [
    "ledger",
    "objective",
    "rollout",
    "score",
    "shaping",
]
