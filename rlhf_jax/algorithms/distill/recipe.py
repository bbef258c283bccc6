"""The options of on-policy distillation, and what it brings: an experience and a loss.

    loss = β·divergence(student, teacher), per token
           + policy loss of the reward, if there is one

The teacher is the reference of the KL, so that everything that is reported of the
reference (`objective/kl`) is of the teacher.
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
# Options that nothing reads where no reward is learned from.
OF_ADVANTAGES = "scores", "whiten_advantages", "off_policy_mask", "token_choice"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillRecipe(ReinforceRecipe):
    """The coefficients and choices of distillation; an option group."""

    temperature: float = 1.0
    """Temperature that divides the logits of student and teacher."""
    penalty: Penalty = MEASURED
    """Estimator of the KL to the teacher; placement reward adds it to the reward, so
    that a token is credited with the KL of the tokens after it too."""
    divergence: Divergence | None = "reverse"
    """Divergence that the loss takes at every token: reverse is KL(student ‖ teacher),
    forward KL(teacher ‖ student), jensen_shannon lies between them; None leaves the KL
    to the reward."""
    jsd_beta: float = HALF
    """With divergence jensen_shannon: share of the teacher in the mixture, between 0
    (which tends to the forward KL) and 1 (to the reverse KL)."""
    top_k: int | None = None
    """Number of the student's most likely tokens that the divergence treats one by one,
    with one bucket for all others; None treats every token one by one."""

    group_size: int = 1
    """Responses per prompt, in neighbouring rows."""
    success_score: float | None = None
    """Score from which a response is a demonstration (SDPO): of each response the
    teacher reads the prompt with the first such one of its group that is another, and
    those without one are not trained on. The reward is read for this alone. None: the
    teacher reads no response."""

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
    def has_ratio(self) -> bool:
        """Whether the loss has a probability ratio: none corrects here."""
        return False

    def has_policy_loss(self, *, rewarded: bool) -> bool:
        """Whether the policy loss is a term: else its head is not differentiated."""
        bonus = self.entropy_coef != 0 or self.entropy_control is not None
        return self._has_advantages(rewarded=rewarded) or self._guarded or bonus

    def _has_advantages(self, *, rewarded: bool) -> bool:
        """Whether advantages are of something, and not 0."""
        return (rewarded and self.success_score is None) or self.penalty.in_reward

    @property
    def _guarded(self) -> bool:
        """Whether updates end by the ratio of the policy loss."""
        return self.stop_approxkl is not None or self.max_ratio_mean is not None

    def check_read(self, *, rewarded: bool) -> None:
        """Checks that the options of the policy loss are left alone without one."""
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

    rewarded: bool = False  # there is a reward beside the teacher

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_read(rewarded=self.rewarded)
        self.check_top_k(top_k=self.top_k)

    @property
    def rows_per_prompt(self) -> int:
        """Samples of each prompt, in neighbouring rows."""
        return self.group_size

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
        """Whether the policy loss is a term: else its head is not differentiated."""
        return self.has_policy_loss(rewarded=self.rewarded)

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """Rewards to go, as REINFORCE++ has them, and no stats.

        0 without a reward, or with one that is read for demonstrations alone.
        """
        experience = reward_to_go_experience(
            scored, kl_coef=kl_coef, whiten_advantages=self.whiten_advantages
        )
        if self.success_score is not None:
            # An entropy bonus or a guard has the policy loss computed all the same.
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
        """`distillation_loss` of the parts; a student has one teacher alone."""
        expect_none(
            "beside the teacher",
            advice="leave them out",
            further=", ".join(frozen.further) or None,
        )
        return super().minibatch_loss(minibatch, kl_coef=kl_coef, frozen=frozen)

    def terms(self, policy: Any, **part: Unpack[Part]) -> tuple[Array, masked.Stats]:
        """`distillation_loss` f32[] of a part of a minibatch, and its stats."""
        return distillation_loss(policy, recipe=self, **part)
