"""`critic`: where the critic starts, and how it follows its gradient."""

from __future__ import annotations

import dataclasses

from rlhf_jax.train.config.optimizer import Optimizer

POLICY, REWARD_MODEL = "policy", "reward_model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic(Optimizer):
    """The critic of PPO, options with the prefix `critic.`."""

    learning_rate: float = 1e-5
    """Peak learning rate of the critic."""
    start: str = POLICY
    """Model whose trunk the critic starts with: policy, reward_model, or a checkpoint
    of any shape; values start at 0, or as the reward model's scores."""
