"""The steps that all policy gradients share, from prompts to scores."""

from rlhf_jax.algorithms.flow import objective, rollout, score, selection, shaping

__all__ = ["objective", "rollout", "score", "selection", "shaping"]
