"""PPO: a critic, generalised advantages and a clipped loss."""

from rlhf_jax.algorithms.policy_gradient.algorithm import values
from rlhf_jax.algorithms.policy_gradient.iteration import (
    iteration,
    learn,
    make_experience,
    sample,
    seen_by_reward,
)
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.algorithms.ppo.loss import gae_experience, ppo_loss
from rlhf_jax.algorithms.ppo.recipe import N_PLUS, OPENAI_2019, PPO, Recipe
from rlhf_jax.roles.rewards import Reward

__all__ = [
    "N_PLUS",
    "OPENAI_2019",
    "PPO",
    "Recipe",
    "Reward",
    "gae_experience",
    "iteration",
    "learn",
    "make_experience",
    "ppo_loss",
    "sample",
    "seen_by_reward",
    "shuffle_key",
    "update",
    "values",
]
