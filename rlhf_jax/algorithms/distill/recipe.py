"""On-policy distillation: its options, its experience and its loss.

    loss = β·divergence(student, teacher), per token
           + policy loss of the reward, if there is one

The teacher takes the place of the reference, so metrics of the reference
(`objective/kl`) are about the teacher.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, Unpack, get_args

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.algorithms.distill.loss import distillation_loss
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.loss import Part
from rlhf_jax.algorithms.reinforce.experience import reward_to_go_experience
from rlhf_jax.algorithms.reinforce.recipe import ReinforceRecipe
from rlhf_jax.algorithms.state import LossFunction
from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import one_of
from rlhf_jax.functional.errors import expect_none, refuse
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels

Array = jax.Array
Divergence = Literal["reverse", "forward", "jensen_shannon"]
MEASURED = Penalty(placement=None)
HALF = 0.5
# Options that nothing reads without a reward to learn from.
OF_ADVANTAGES = "scores", "whiten_advantages", "off_policy_mask", "token_choice"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillRecipe(ReinforceRecipe):
    """The coefficients and choices of distillation; an option group."""

    temperature: float = 1.0
    """Temperature that divides the logits of student and teacher."""
    penalty: Penalty = MEASURED
    """Estimator of the KL to the teacher. Placement reward subtracts it from the
    reward, so that a token is also credited with the KL of the tokens after it."""
    divergence: Divergence | None = "reverse"
    """Divergence in the loss at every token: reverse is KL(student ‖ teacher), forward
    is KL(teacher ‖ student), jensen_shannon lies between them; None leaves the KL to
    the reward."""
    jsd_beta: float = HALF
    """With divergence jensen_shannon: share of the teacher in the mixture, between 0
    (towards the forward KL) and 1 (towards the reverse KL)."""
    top_k: int | None = None
    """Number of the student's most likely tokens that the divergence treats one by one,
    with one bucket for all others; None treats every token one by one."""

    group_size: int = 1
    """Responses per prompt, in neighbouring rows."""
    success_score: float | None = None
    """Lowest score of a demonstration (SDPO): for each response, the teacher reads the
    prompt with the first other response of the group that scores this or more.
    Responses for which there is none are not trained on. The reward then only selects
    demonstrations. None: the teacher reads no demonstration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(divergence=self.divergence, among=(None, *get_args(Divergence)))
        checks.within(
            above=0,
            below=1,
            advice="at 0 and 1 the divergence is 0: take forward or reverse",
            jsd_beta=self.jsd_beta,
        )
        reads_beta = self.divergence == "jensen_shannon" or self.jsd_beta == HALF
        expect_none(
            f"with divergence {self.divergence}, which does not read it",
            advice="leave it out, or choose another divergence",
            jsd_beta=None if reads_beta else self.jsd_beta,
            top_k=self.top_k if self.divergence is None else None,
        )
        checks.positive(top_k=self.top_k)
        checks.finite(success_score=self.success_score)
        checks.groups(self.group_size, group_size=self.group_size)
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.penalty.in_loss or self.penalty.needs_logits:
            yield (
                f"penalty: expected k1, k2 or k3 in the reward or nowhere, got "
                f"{self.penalty.value_estimator} in the {self.penalty.placement}; "
                f"choose a divergence for the loss, which is exact"
            )
        if self.divergence is None and not self.penalty.in_reward:
            yield (
                "divergence: expected one, or penalty.placement reward, got neither, "
                "so that nothing would be learned from the teacher; choose either"
            )
        if self.aggregation == "prompt_mean":
            yield (
                "aggregation: expected another than prompt_mean in distillation, which "
                "has no advantages over groups; choose token_mean"
            )
        if self.success_score is None:
            return
        if self.group_size < 2:
            yield (
                f"success_score: expected a group to take a demonstration from, got "
                f"group_size {self.group_size}; choose 2 or more"
            )
        if self.divergence is None or self.penalty.in_reward:
            yield (
                "success_score: expected a divergence in the loss alone, got a KL in "
                "the reward, which is read for demonstrations; choose reverse"
            )

    @property
    def rows_per_prompt(self) -> int:
        """Samples of each prompt, in neighbouring rows."""
        return self.group_size

    @property
    def has_ratio(self) -> bool:
        """Whether the loss has a probability ratio that a stale sampler biases: no."""
        return False

    def has_policy_loss(self, *, rewarded: bool) -> bool:
        """Whether the policy loss is a term of the loss."""
        bonus = self.entropy_coef != 0 or self.entropy_control is not None
        return self._has_advantages(rewarded=rewarded) or self._guarded or bonus

    def _has_advantages(self, *, rewarded: bool) -> bool:
        """Whether advantages are not 0 by definition."""
        return (rewarded and self.success_score is None) or self.penalty.in_reward

    @property
    def _guarded(self) -> bool:
        """Whether a guard on the ratio of the policy loss can end updates."""
        return self.stop_approxkl is not None or self.max_ratio_mean is not None

    def check_read(self, *, rewarded: bool) -> None:
        """Checks that options of the policy loss have their defaults without one."""
        if self._has_advantages(rewarded=rewarded):
            return
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        options = OF_ADVANTAGES if self._guarded else (*OF_ADVANTAGES, "surrogate")
        unread = [name for name in options if getattr(self, name) != defaults[name]]
        if self.weighted is not None and not self._guarded:
            unread.append("sampler_correction")
        where, other = "without a reward", ", or give a reward"
        if rewarded:
            where, other = "with success_score, which alone reads the reward", ""
        expect_none(
            f"{where}: the loss has no advantages",
            advice=f"leave it out{other}",
            **{name: getattr(self, name) for name in unread},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill(DistillRecipe, PolicyGradient):
    """A recipe with its shapes and optimizer; hashable, so static under `jax.jit`.

    `Distill(**vars(recipe), model=...)` makes one of a `DistillRecipe`.
    """

    rewarded: bool = False  # there is a reward in addition to the teacher

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_read(rewarded=self.rewarded)
        self.check_top_k(top_k=self.top_k)

    @property
    def leaves_out(self) -> bool:
        """Whether some responses of a rollout are not trained on."""
        return self.success_score is not None or super().leaves_out

    @property
    def reads_ref_hidden(self) -> bool:
        """Whether the loss reads the teacher's distributions."""
        return self.divergence is not None

    @property
    def reads_advantages(self) -> bool:
        """Whether the policy loss is a term; if not, it has no backward pass."""
        return self.has_policy_loss(rewarded=self.rewarded)

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """Rewards to go, as in REINFORCE++, and no stats.

        Advantages are 0 where the reward only selects demonstrations.
        """
        experience = reward_to_go_experience(
            scored, kl_coef=kl_coef, whiten_advantages=self.whiten_advantages
        )
        if self.success_score is not None:
            # An entropy bonus or a guard still computes the policy loss.
            none = jnp.zeros_like(experience.advantages)
            experience = dataclasses.replace(experience, advantages=none)
        return experience, {}

    def minibatch_loss(
        self,
        minibatch: PolicyExperience,
        *,
        kl_coef: Array,
        frozen: FrozenModels = NO_MODELS,
    ) -> tuple[PolicyExperience, LossFunction]:
        """`distillation_loss` of the parts; further references are refused."""
        expect_none(
            "beside the teacher",
            advice="leave them out",
            further=", ".join(frozen.further) or None,
        )
        return super().minibatch_loss(minibatch, kl_coef=kl_coef, frozen=frozen)

    def terms(self, policy: Any, **part: Unpack[Part]) -> tuple[Array, masked.Stats]:
        """`distillation_loss` f32[] of a part of a minibatch, and its stats."""
        return distillation_loss(policy, recipe=self, **part)
