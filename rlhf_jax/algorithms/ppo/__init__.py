"""PPO: a critic, generalised advantages and a clipped loss."""

from rlhf_jax.algorithms.ppo.iteration import (
    Reward,
    iteration,
    judged,
    learn,
    make_experience,
    sample,
    shuffle_key,
    update,
    update_policy,
    values,
)
from rlhf_jax.algorithms.ppo.loss import ppo_loss
from rlhf_jax.algorithms.ppo.recipe import PPO, Recipe

__all__ = [
    "PPO",
    "Recipe",
    "Reward",
    "iteration",
    "judged",
    "learn",
    "make_experience",
    "ppo_loss",
    "sample",
    "shuffle_key",
    "update",
    "update_policy",
    "values",
]
