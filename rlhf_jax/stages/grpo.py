"""GRPO, RLOO and REINFORCE++: the policy gradient of PPO over groups, without a critic.

    rollout ─> reward ─> learn = price ─> group_experience ─> update
    └───────────────────────── iteration ──────────────────────────┘

The rows g·G to g·G + G - 1 of a batch are G samples of one prompt. What a critic would
expect of a response is what the others of its group got.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rlhf_jax.functional import advantages as advantages_
from rlhf_jax.functional import checks, kl_penalty, masked, token_rewards
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl_penalty import Penalty
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.roles.rewards import Scores
from rlhf_jax.stages import policy_gradient, policy_update
from rlhf_jax.stages.batch import (
    PolicyExperience,
    Prompts,
    Rollout,
    Scored,
    Sequences,
)
from rlhf_jax.stages.policy_config import PolicyGradient, PolicyRecipe, one_of
from rlhf_jax.stages.policy_gradient import Reward
from rlhf_jax.stages.policy_terms import policy_terms
from rlhf_jax.stages.state import LossFunction, TrainState

Array = jax.Array
Params = Any
Baseline = Literal["group", "leave_one_out"] | None
Normalise = Literal["group", "rollout"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRecipe(PolicyRecipe):
    """The coefficients and choices of GRPO; an option group of a command line."""

    penalty: Penalty = kl_penalty.IN_LOSS
    """How the KL acts."""
    group_size: int = 8
    """Samples of each prompt, in neighbouring rows."""
    baseline: Baseline = "group"
    """What is taken off a response's reward: the mean of its group (GRPO), that of the
    others (RLOO), or None, where each token has its reward to go (REINFORCE++)."""
    normalise: Normalise = None
    """By what standard deviation advantages are divided: their group's (GRPO as
    published), or all tokens' of the rollout after their mean is off (REINFORCE++)."""
    num_epochs: int = 1
    """Passes over each batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(baseline=self.baseline, among=("group", "leave_one_out", None))
        one_of(normalise=self.normalise, among=("group", "rollout", None))
        least = 1 if self.baseline is None else 2
        checks.groups(self.group_size, group_size=self.group_size, least=least)
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


def iteration(
    state: TrainState,
    *,
    prompts: Prompts,
    reference: Frozen | None,
    reward: Reward,
    key: Array,
    grpo: GRPO,
    base: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats, Scored]:
    """One iteration: answer each prompt G times, score the answers, learn from them.

    Maximises E[reward(x, y)] - β·KL(π ‖ π_ref).

    Args:
      state: of `state.grpo_state`; donated by the caller's `jit`.
      prompts: Prompts[B, P], each in `grpo.group_size` neighbouring rows.
      reference: the frozen policy; None takes no KL at all.
      reward, key, base, ptx: as `ppo.iteration`.
      grpo: static.

    Returns, Raises: as `ppo.iteration`; InputError too where groups do not divide B.
    """
    rollout = sample(state.policy, prompts=prompts, key=key, grpo=grpo, base=base)
    return learn(
        state,
        rollout=rollout,
        scores=reward(policy_gradient.judged(rollout, algorithm=grpo)),
        reference=reference,
        key=key,
        grpo=grpo,
        base=base,
        ptx=ptx,
    )


def sample(
    policy: Params,
    *,
    prompts: Prompts,
    key: Array,
    grpo: GRPO,
    base: Frozen | None = None,
) -> Rollout:
    """The rollout of an iteration; a group's prompt is run once.

    Args, Raises: as `iteration`, with the policy's parameters or adapters.
    """
    return policy_gradient.sample(
        policy,
        prompts=prompts,
        key=key,
        algorithm=grpo,
        base=base,
        group_size=grpo.group_size,
    )


def learn(
    state: TrainState,
    *,
    rollout: Rollout,
    scores: Array | Scores,
    reference: Frozen | None,
    key: Array,
    grpo: GRPO,
    ref_logprobs: Array | None = None,
    base: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats, Scored]:
    """An iteration from the scores on, as `ppo.learn`.

    Args, Returns, Raises: as `ppo.learn` and `iteration`.
    """
    _, shuffle_key = jax.random.split(key)
    scored, state, kl_coef, stats, mismatch = policy_gradient.price(
        state,
        rollout=rollout,
        scores=scores,
        reference=reference,
        algorithm=grpo,
        critic=None,
        ref_logprobs=ref_logprobs,
        base=base,
    )
    experience, group_stats = group_experience(
        scored,
        kl_coef=kl_coef,
        group_size=grpo.group_size,
        baseline=grpo.baseline,
        normalise=grpo.normalise,
    )
    state, update_stats = update(
        state,
        experience=experience,
        key=shuffle_key,
        grpo=grpo,
        base=base,
        reference=reference,
        ptx=ptx,
    )
    if mismatch is not None:  # the update compared the trainer with itself
        update_stats["policy/sampler_mismatch"] = mismatch
    return state, stats | group_stats | update_stats, scored


def group_experience(
    scored: Scored,
    *,
    kl_coef: Array | float,
    group_size: int,
    baseline: Baseline,
    normalise: Normalise,
) -> tuple[PolicyExperience, masked.Stats]:
    """Scored -> PolicyExperience: advantages over the samples of one prompt.

    With R_i the sum of a response's token rewards, the score and -β·KL where that is
    in the reward, every token of response i has the advantage

        group            R_i - mean(R), over std(R) where normalised by the group
        leave_one_out    R_i - mean of the others
        None             Σ_{s >= t} r_s, the token's own reward to go

    Args:
      scored: Scored[B, S], the groups in neighbouring rows.
      kl_coef: β, f32[], reward units per nat.
      group_size, baseline, normalise: as `GroupRecipe`.

    Returns:
      PolicyExperience[B, S] and {name: (sum, weight)}. `group/equal_fraction`: share of
      groups whose rewards are all the same, which teach nothing; `group/std`: mean
      standard deviation (ddof 1) within a group, reward units. Neither without groups.

    Raises:
      InputError: the groups do not divide the rows.

    Source: Shao et al. 2024, arXiv:2402.03300 (GRPO); Ahmadian et al. 2024,
    arXiv:2402.14740 (RLOO); Hu 2025, arXiv:2501.03262 (REINFORCE++).
    """
    mask = scored.rollout.response_mask
    rewards = token_rewards.token_rewards(
        scores=scored.scores, kl=scored.kl, mask=mask, kl_coef=kl_coef
    )
    totals = masked.masked_sum(rewards, mask=mask, axis=1)
    stats: masked.Stats = {}
    if baseline is None:
        advantages = jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    else:
        if baseline == "group":
            of_rows = advantages_.group_relative(
                totals, group_size=group_size, normalise=normalise == "group"
            )
        else:
            of_rows = advantages_.leave_one_out(totals, group_size=group_size)
        advantages = jnp.broadcast_to(of_rows[:, None], mask.shape)
        stats = _group_stats(totals, group_size)
    advantages = jnp.where(mask, advantages, 0.0)
    if normalise == "rollout":
        advantages = masked.masked_whiten(advantages, mask=mask)
    experience = PolicyExperience(
        tokens=scored.rollout.tokens,
        mask=scored.rollout.mask,
        response_mask=mask,
        old_logprobs=scored.rollout.old_logprobs,
        ref_logprobs=scored.ref_logprobs,
        token_rewards=rewards,
        advantages=advantages,
    )
    return experience, stats


def update(
    state: TrainState,
    *,
    experience: PolicyExperience,
    key: Array,
    grpo: GRPO,
    base: Frozen | None = None,
    reference: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats]:
    """Epochs over reshuffled minibatches, as `ppo.update`, of the policy alone.

    Args, Returns, Raises: as `ppo.update`.
    """
    kl_coef = policy_update.kl_coef(state, algorithm=grpo)

    def loss_of(minibatch: PolicyExperience) -> tuple[PolicyExperience, LossFunction]:
        mask = minibatch.response_mask
        terms = functools.partial(
            policy_terms,
            kl_coef=kl_coef,
            num_tokens=mask.sum(dtype=jnp.float32),
            num_responses=mask.any(axis=1).sum(dtype=jnp.float32),
            algorithm=grpo,
            base=base,
            reference=reference,
        )

        def loss(
            trained: tuple[Params, None], part: PolicyExperience
        ) -> tuple[Array, masked.Stats]:
            found = terms(trained[0], experience=part)
            return found.loss, found.stats

        return minibatch, loss

    return policy_update.update(
        state,
        experience=experience,
        key=key,
        algorithm=grpo,
        loss_of=loss_of,
        base=base,
        ptx=ptx,
    )


def _group_stats(totals: Array, group_size: int) -> masked.Stats:
    equal = advantages_.equal_groups(totals, group_size=group_size)
    spread = jnp.std(totals.reshape(-1, group_size), axis=1, ddof=1)
    count = jnp.asarray(equal.size, jnp.float32)
    return {
        "group/equal_fraction": (equal.sum(dtype=jnp.float32), count),
        "group/std": (spread.sum(), count),
    }


PUBLISHED = GroupRecipe(
    penalty=Penalty(value_estimator="k3", placement="loss"),
    temperature=1.0,
    group_size=64,
    baseline="group",
    normalise="group",
    aggregation="sequence_mean",
)
"""GRPO as DeepSeekMath has it (Shao et al. 2024, arXiv:2402.03300), with
`kl_control.fixed(0.04)`: k3 in the loss, whose gradient is that of the *forward* KL."""

RLOO = GroupRecipe(
    penalty=kl_penalty.IN_REWARD,
    group_size=4,
    baseline="leave_one_out",
    normalise=None,
)
"""Ahmadian et al. 2024, arXiv:2402.14740: KL in the reward, the others as baseline."""

REINFORCE_PLUS_PLUS = GroupRecipe(
    penalty=kl_penalty.IN_REWARD,
    group_size=1,
    baseline=None,
    normalise="rollout",
)
"""Hu 2025, arXiv:2501.03262: no groups, rewards to go whitened over the rollout."""
