"""GRPO and RLOO: groups of samples instead of a critic."""

from rlhf_jax.algorithms.grpo.experience import group_experience
from rlhf_jax.algorithms.grpo.recipe import (
    GRPO,
    PUBLISHED,
    RLOO,
    GroupRecipe,
)
from rlhf_jax.algorithms.policy_gradient.iteration import (
    Reward,
    iteration,
    learn,
    make_experience,
    sample,
    seen_by_reward,
    shuffle_key,
)
from rlhf_jax.algorithms.policy_gradient.update import update

__all__ = [
    "GRPO",
    "PUBLISHED",
    "RLOO",
    "GroupRecipe",
    "Reward",
    "group_experience",
    "iteration",
    "learn",
    "make_experience",
    "sample",
    "seen_by_reward",
    "shuffle_key",
    "update",
]
