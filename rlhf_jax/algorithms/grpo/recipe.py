"""GRPO and RLOO: rows g·G to g·G + G - 1 of a batch are G samples of one prompt.

The rewards of its group serve as the baseline of a response, in place of a critic. The
loss is the policy's alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

import jax

from rlhf_jax.algorithms.batch import PolicyExperience, Prompts, Rollout, Scored
from rlhf_jax.algorithms.flow.shaping import AS_THEY_ARE
from rlhf_jax.algorithms.grpo.experience import (
    Baseline,
    EqualGroups,
    Normalise,
    OverlongMask,
    group_experience,
)
from rlhf_jax.algorithms.grpo.greedy import rollout_with_greedy, without_greedy
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import one_of
from rlhf_jax.functional.errors import expect_none, refuse
from rlhf_jax.functional.kl.penalty import IN_LOSS, Penalty
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels

Array = jax.Array
Params = Any
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRecipe(PolicyRecipe):
    """The coefficients and choices of GRPO; an option group of a command line."""

    penalty: Penalty = IN_LOSS
    """Estimator of the KL and where its penalty acts."""
    group_size: int = 8
    """Responses per prompt, in neighbouring rows."""
    baseline: Baseline = "group"
    """Baseline subtracted from a response's reward: group is the mean of its group
    (GRPO), leave_one_out the mean of the others in the group (RLOO), length_weighted
    the mean of the group weighted by response length (OPO), greedy the reward of the
    group's last response, which is decoded greedily and not trained on (ReMax)."""
    normalise: Normalise = None
    """Standard deviation by which advantages are divided: group is that of their group
    (GRPO as published), rollout that of all tokens, whose mean is subtracted first;
    each divides every reward by its deviation in the group, and the weighted sum by
    that of all responses (GDPO). None does not divide."""
    kl_to_go: bool = False
    """Whether the KL in the reward is credited per token (FRPO): a token's advantage is
    that of the score, minus β times the KL of this token and of all later ones.
    Otherwise baseline and deviation are taken over score and KL together."""
    overlong_mask: OverlongMask = None
    """Treatment of responses without a stop token: loss leaves them out of the loss
    (DAPO), group also out of the mean and deviation of their group; None trains on
    them."""
    equal_groups: EqualGroups = "keep"
    """Treatment of groups of equal rewards, whose advantages are 0: keep counts their
    tokens in the loss's divisor, leave_out does not (dynamic sampling)."""
    num_epochs: int = 1
    """Number of passes over each batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(baseline=self.baseline, among=get_args(Baseline))
        one_of(normalise=self.normalise, among=("group", "rollout", "each", None))
        one_of(overlong_mask=self.overlong_mask, among=("loss", "group", None))
        one_of(equal_groups=self.equal_groups, among=("keep", "leave_out"))
        if self.truncates_reward_only:
            expect_none(
                "with reward_only of fixed_length, where the policy is trained on "
                "tokens after the stop token",
                advice="leave one of them out",
                overlong_mask=self.overlong_mask,
            )
        checks.groups(self.group_size, group_size=self.group_size, least=2)
        refuse(self._faults())

    @property
    def rows_per_prompt(self) -> int:
        """Samples of each prompt, in neighbouring rows."""
        return self.group_size

    def _faults(self) -> Iterator[str]:
        if self.kl_to_go and not self.penalty.in_reward:
            yield (
                f"kl_to_go: expected a KL in the reward to credit, got placement "
                f"{self.penalty.placement}; choose penalty.placement reward, or leave "
                f"it out"
            )
        if self.normalise in ("group", "each") and self.baseline != "group":
            yield (
                f"normalise: expected 'rollout' or None with baseline "
                f"{self.baseline!r}, got {self.normalise!r}, whose deviation is about "
                f"a mean that is not the baseline; choose baseline='group'"
            )
        added = self.penalty.in_reward or self.scores != AS_THEY_ARE
        if self.normalise == "each" and added:
            yield (
                "normalise: expected another than 'each' with a KL in the reward or "
                "options of scores, which are about the sum of the rewards; choose "
                "penalty.placement='loss', and give penalties of scores as rewards"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(GroupRecipe, PolicyGradient):
    """A recipe with its shapes and optimizer; hashable, so static under `jax.jit`.

    `GRPO(**vars(recipe), model=...)` makes one from a `GroupRecipe`, whose defaults
    take precedence over those of `PolicyGradient`.
    """

    @property
    def reads_stops(self) -> dict[str, bool]:
        """Whether an option reads stop tokens, by name."""
        return super().reads_stops | {"overlong_mask": self.overlong_mask is not None}

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """`group_experience`, with each prompt in `group_size` neighbouring rows."""
        return group_experience(
            scored,
            kl_coef=kl_coef,
            group_size=self.group_size,
            baseline=self.baseline,
            normalise=self.normalise,
            kl_to_go=self.kl_to_go,
            overlong_mask=self.overlong_mask,
            equal=self.equal_groups,
            stop_ids=self.stop_ids,
            prompt_mean=self.aggregation == "prompt_mean",
        )

    def rollout(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        frozen: FrozenModels = NO_MODELS,
        version: Array | None = None,
    ) -> Rollout:
        """The policy's responses; with baseline greedy, each group's last is greedy."""
        if self.baseline != "greedy":
            return super().rollout(
                policy, prompts=prompts, key=key, frozen=frozen, version=version
            )
        return rollout_with_greedy(
            policy, prompts=prompts, key=key, recipe=self, version=version
        )

    def reported(self, rows: Tree) -> Tree:
        """All rows except those of greedy responses."""
        if self.baseline != "greedy":
            return rows
        return without_greedy(rows, group_size=self.group_size)

    @property
    def leaves_out(self) -> bool:
        """Whether some responses of a rollout are not trained on."""
        left_out = self.overlong_mask is not None or self.equal_groups == "leave_out"
        return left_out or self.baseline == "greedy" or super().leaves_out
