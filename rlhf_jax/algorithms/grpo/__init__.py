"""GRPO, RLOO and related methods: groups of samples instead of a critic."""

from rlhf_jax.algorithms.grpo import published
from rlhf_jax.algorithms.grpo.experience import group_experience
from rlhf_jax.algorithms.grpo.recipe import GRPO, GroupRecipe
from rlhf_jax.algorithms.policy_gradient.iteration import (
    iteration,
    learn,
    make_experience,
    sample,
    seen_by_reward,
)
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.roles.rewards import Reward

__all__ = [
    "GRPO",
    "GroupRecipe",
    "Reward",
    "group_experience",
    "iteration",
    "learn",
    "make_experience",
    "published",
    "sample",
    "seen_by_reward",
    "shuffle_key",
    "update",
]
