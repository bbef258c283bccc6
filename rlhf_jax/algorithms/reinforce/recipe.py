"""REINFORCE++: its options and its experience.

The loss is the policy's alone, and the KL is in the reward by default.
"""

from __future__ import annotations

import dataclasses

import jax

from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.algorithms.reinforce.experience import reward_to_go_experience
from rlhf_jax.functional import masked

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforceRecipe(PolicyRecipe):
    """The coefficients and choices of REINFORCE++; an option group."""

    whiten_advantages: bool = True
    """Whether advantages are whitened to mean 0 and variance 1 over the rollout; plain
    REINFORCE does not whiten."""
    num_epochs: int = 1
    """Number of passes over each batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class REINFORCE(ReinforceRecipe, PolicyGradient):
    """A recipe with its shapes and optimizer; hashable, so static under `jax.jit`.

    `REINFORCE(**vars(recipe), model=...)` makes one from a `ReinforceRecipe`.
    """

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """Rewards to go (`reward_to_go_experience`), and no stats."""
        experience = reward_to_go_experience(
            scored, kl_coef=kl_coef, whiten_advantages=self.whiten_advantages
        )
        return experience, {}


PUBLISHED = ReinforceRecipe()
"""Hu 2025, arXiv:2501.03262: KL in the reward, rewards to go whitened over the
rollout."""
