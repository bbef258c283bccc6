"""Nash-MD: learn to be preferred to samples of a mixture of policy and reference."""

from rlhf_jax.algorithms.nash_md.recipe import NashMD, NashMDRecipe
from rlhf_jax.algorithms.policy_gradient.iteration import iteration, learn, sample

__all__ = ["NashMD", "NashMDRecipe", "iteration", "learn", "sample"]
