"""The steps that all policy gradients share, from prompts to scores."""

from rlhf_jax.algorithms.flow import (
    further,
    objective,
    rollout,
    score,
    selection,
    shaping,
)

__all__ = ["further", "objective", "rollout", "score", "selection", "shaping"]
