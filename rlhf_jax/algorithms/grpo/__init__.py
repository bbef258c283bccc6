"""GRPO, RLOO and REINFORCE++: groups of samples instead of a critic."""

from rlhf_jax.algorithms.grpo.experience import group_experience
from rlhf_jax.algorithms.grpo.iteration import iteration, learn, sample, update
from rlhf_jax.algorithms.grpo.recipe import (
    GRPO,
    PUBLISHED,
    REINFORCE_PLUS_PLUS,
    RLOO,
    GroupRecipe,
)

__all__ = [
    "GRPO",
    "PUBLISHED",
    "REINFORCE_PLUS_PLUS",
    "RLOO",
    "GroupRecipe",
    "group_experience",
    "iteration",
    "learn",
    "sample",
    "update",
]
