"""GRPO and RLOO: the rows g·G to g·G + G - 1 of a batch are G samples of one prompt.

What a critic would expect of a response is what the others of its group got. The loss
is that of the policy alone.
"""

from __future__ import annotations

import dataclasses

import jax

from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.algorithms.grpo.experience import (
    Baseline,
    Normalise,
    group_experience,
)
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe, one_of
from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_LOSS, IN_REWARD, Penalty

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRecipe(PolicyRecipe):
    """The coefficients and choices of GRPO; an option group of a command line."""

    penalty: Penalty = IN_LOSS
    """Estimator of the KL and where its penalty acts."""
    group_size: int = 8
    """Responses per prompt, in neighbouring rows."""
    baseline: Baseline = "group"
    """Baseline subtracted from a response's reward: group is the mean of its group
    (GRPO), leave_one_out that of the others in it (RLOO)."""
    normalise: Normalise = None
    """Standard deviation by which advantages are divided: group is that of their group
    (GRPO as published), rollout that of all tokens, whose mean is subtracted first;
    None does not divide."""
    num_epochs: int = 1
    """Number of passes over each batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(baseline=self.baseline, among=("group", "leave_one_out"))
        one_of(normalise=self.normalise, among=("group", "rollout", None))
        checks.groups(self.group_size, group_size=self.group_size, least=2)
        if self.normalise == "group" and self.baseline != "group":
            raise InputError(
                f"normalise: expected 'rollout' or None with baseline "
                f"{self.baseline!r}, got 'group', whose deviation is about the mean "
                f"that is not taken off; choose baseline='group'"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(GroupRecipe, PolicyGradient):
    """A recipe with its shapes and optimizer; hashable, so static under `jax.jit`.

    `GRPO(**vars(recipe), model=...)` makes one of a `GroupRecipe`, whose defaults
    stand before those of `PolicyGradient`.
    """

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """Advantages over the samples of one prompt, and how many groups teach nothing.

        Args:
          scored: Scored[B, S], each prompt in `group_size` neighbouring rows.
          kl_coef: β of this iteration, f32[], reward units per nat.

        Returns:
          PolicyExperience[B, S] and the stats of `group_experience`.

        Raises:
          InputError: the groups do not divide the rows.
        """
        return group_experience(
            scored,
            kl_coef=kl_coef,
            group_size=self.group_size,
            baseline=self.baseline,
            normalise=self.normalise,
        )

    @property
    def rows_per_prompt(self) -> int:
        """Samples of each prompt, in neighbouring rows."""
        return self.group_size


PUBLISHED = GroupRecipe(
    penalty=Penalty(value_estimator="k3", placement="loss"),
    temperature=1.0,
    group_size=64,
    baseline="group",
    normalise="group",
    aggregation="sequence_mean",
)
"""GRPO as DeepSeekMath has it (Shao et al. 2024, arXiv:2402.03300), with
`kl.control.fixed(0.04)`: k3 in the loss, whose gradient is that of the *forward* KL.
Its std, and its mean over each response's own length, bias the direction."""

RLOO = GroupRecipe(
    penalty=IN_REWARD,
    group_size=4,
    baseline="leave_one_out",
    normalise=None,
)
"""Ahmadian et al. 2024, arXiv:2402.14740: KL in the reward, the others as baseline.
Without bias with aggregation "constant", or responses of one length."""
