"""REINFORCE++: rewards to go per token, without a critic or groups."""

from rlhf_jax.algorithms.policy_gradient.iteration import (
    iteration,
    learn,
    make_experience,
    sample,
    seen_by_reward,
)
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.algorithms.reinforce.experience import reward_to_go_experience
from rlhf_jax.algorithms.reinforce.recipe import PUBLISHED, REINFORCE, ReinforceRecipe
from rlhf_jax.roles.rewards import Reward

__all__ = [
    "PUBLISHED",
    "REINFORCE",
    "ReinforceRecipe",
    "Reward",
    "iteration",
    "learn",
    "make_experience",
    "reward_to_go_experience",
    "sample",
    "seen_by_reward",
    "shuffle_key",
    "update",
]
