"""PPO: its options, GAE, the value loss and the critic.

`Recipe` is an option group of a command line. `PPO` adds shapes and optimizers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Experience, Scored
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.algorithm import CriticRecipe, PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import Clip, FixedLength, PolicyRecipe
from rlhf_jax.algorithms.ppo.loss import Whiten, gae_experience, ppo_loss, whitened
from rlhf_jax.algorithms.state import LossFunction, Optimizer
from rlhf_jax.functional import checks, losses, masked
from rlhf_jax.functional.checks import InputError, one_of
from rlhf_jax.functional.errors import refuse
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import Packing
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(PolicyRecipe):
    """The coefficients and choices of PPO; an option group of a command line."""

    gamma: float = 1.0
    """Discount γ per token."""
    lam: float = 0.95
    """λ of GAE, from 0, which trusts the critic, to 1, which trusts the returns."""
    whiten_rewards: Whiten = None
    """Rows over which token rewards are scaled to variance 1, with their mean kept
    (openai-2019: minibatch); None disables it."""
    whiten_advantages: Whiten = "rollout"
    """Rows over which advantages are whitened to mean 0 and variance 1; None disables
    it."""
    whiten_ddof: Literal[0, 1] = 0
    """Degrees of freedom subtracted in the variance of whitening: 0 is the biased
    estimate (openai-2019, n-plus), 1 the unbiased one (TRL)."""
    value_after_stop: bool = False
    """Whether the state after the last token has a value and receives the score
    (n-plus)."""
    value_clip_range: float | None = 0.2
    """Clip range of values around the old values, reward units; None disables it."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    critic_warmup: int = 0
    """Number of iterations at the start that train the critic alone."""
    shared_trunk: bool = False
    """Whether the critic is a head on the policy's trunk (openai-2019) instead of a
    model of its own (n-plus)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.non_negative(vf_coef=self.vf_coef, critic_warmup=self.critic_warmup)
        checks.fraction(gamma=self.gamma, lam=self.lam)
        checks.positive(value_clip_range=self.value_clip_range)
        one_of(whiten_rewards=self.whiten_rewards, among=("rollout", "minibatch", None))
        one_of(
            whiten_advantages=self.whiten_advantages,
            among=("rollout", "minibatch", None),
        )
        one_of(whiten_ddof=self.whiten_ddof, among=(0, 1))
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.whiten_rewards == "minibatch" and self.whiten_advantages == "rollout":
            yield (
                "whiten_rewards: expected 'rollout' or None where advantages are "
                "whitened over the rollout, got 'minibatch': they do not exist before "
                "the minibatch then; set whiten_advantages='minibatch'"
            )

        if self.weighted is not None and "minibatch" in (
            self.whiten_rewards,
            self.whiten_advantages,
        ):
            yield (
                "sampler_correction: expected whitening over the rollout or none with "
                "weights, as advantages of a minibatch are estimated after they were "
                "weighted, got 'minibatch'; choose 'rollout', or the correction ratio"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPO(Recipe, PolicyGradient):
    """A recipe with its shapes and optimizers; hashable, so static under `jax.jit`.

    `PPO(**vars(recipe), model=...)` makes one from a `Recipe`. With `lora` the critic
    is adapters and a score head over the policy's base.
    """

    critic_model: ModelConfig
    critic_optimizer: Optimizer

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_model == self.model:
            return
        for name, value, why in (
            ("shared_trunk", self.shared_trunk, "the critic is a head on the policy"),
            ("lora", self.lora is not None, "they share a base"),
        ):
            if value:
                raise InputError(
                    f"expected one shape of policy and critic with {name}, as {why}, "
                    f"got {self.model} and {self.critic_model}; pass the policy's as "
                    f"critic_model, or leave {name} out"
                )

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[Experience, masked.Stats]:
        """`gae_experience`, and `value/explained_variance` of the critic's values."""
        experience = gae_experience(
            scored,
            kl_coef=kl_coef,
            gamma=self.gamma,
            lam=self.lam,
            whiten_rewards=self.whiten_rewards,
            whiten_advantages=self.whiten_advantages,
            whiten_ddof=self.whiten_ddof,
            value_after_stop=self.value_after_stop,
        )
        stats = losses.explained_variance(
            values=experience.old_values,
            returns=experience.returns,
            # Over response tokens, without N+'s state after the end.
            mask=experience.response_mask,
        )
        return experience, stats

    def minibatch_loss(
        self,
        minibatch: Experience,
        *,
        kl_coef: Array,
        frozen: FrozenModels = NO_MODELS,
    ) -> tuple[Experience, LossFunction]:
        """`ppo_loss` of the parts of a minibatch, which is whitened as a whole."""
        # Before the minibatch is cut: moments of a micro-batch would make the gradient
        # depend on micro_batch_size.
        minibatch = whitened(minibatch, recipe=self)
        mask, value_mask = minibatch.response_mask, minibatch.value_mask
        loss = functools.partial(
            ppo_loss,
            kl_coef=kl_coef,
            num_tokens=mask.sum(dtype=jnp.float32),
            num_values=value_mask.sum(dtype=jnp.float32),
            num_responses=mask.any(axis=1).sum(dtype=jnp.float32),
            num_valued=value_mask.any(axis=1).sum(dtype=jnp.float32),
            recipe=self,
            frozen=frozen,
        )

        def of_part(
            trained: tuple[Any, Any], part: Experience, packing: Packing | None = None
        ) -> tuple[jax.Array, masked.Stats]:
            return loss(*trained, experience=part, packing=packing)

        return minibatch, of_part

    @property
    def critic(self) -> CriticRecipe:
        """A model, adapters of the policy's base, or a head on the policy's trunk."""
        return CriticRecipe(
            self.critic_model,
            self.critic_optimizer,
            after_stop=self.value_after_stop,
            shared_trunk=self.shared_trunk,
            warmup=self.critic_warmup,
        )


OPENAI_2019 = Recipe(
    temperature=0.7,
    fixed_length=FixedLength(truncate_after=16, reward_only=True),
    scores=ScoreShaping(missing_stop_score=-1.0),
    gamma=1.0,
    lam=0.95,
    whiten_rewards="minibatch",
    whiten_advantages="minibatch",
    surrogate=Clip(clip_range=0.2),
    value_clip_range=0.2,
    vf_coef=0.1,
    num_epochs=4,
    shared_trunk=True,
)
"""Ziegler et al. 2019, arXiv:1909.08593, as in openai/lm-human-preferences; with
`kl.control.Adaptive(target=6.0, unit="response").controller(0.15)` and TF's Adam."""

N_PLUS = Recipe(
    temperature=0.7,
    fixed_length=FixedLength(),
    scores=ScoreShaping(missing_stop_score=-1.0),
    gamma=1.0,
    lam=0.95,
    whiten_advantages="minibatch",
    value_after_stop=True,
    surrogate=Clip(clip_range=0.2),
    value_clip_range=0.2,
    vf_coef=0.1,
    num_epochs=4,
)
"""Huang et al. 2024, arXiv:2403.17031 (summarize from feedback); with
`kl.control.fixed(0.05)`, Adam with eps 1e-5, and a critic that starts as the reward
model."""
