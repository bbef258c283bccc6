"""What all policy gradients share: the recipe, the iteration, the update."""

from rlhf_jax.algorithms.policy_gradient.iteration import Reward
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyGradient, PolicyRecipe

__all__ = ["PolicyGradient", "PolicyRecipe", "Reward"]
