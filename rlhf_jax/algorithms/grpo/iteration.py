"""GRPO, RLOO and REINFORCE++: the policy gradient of PPO over groups, without a critic.

    rollout ─> reward ─> learn = price ─> group_experience ─> update
    └───────────────────────── iteration ──────────────────────────┘

The rows g·G to g·G + G - 1 of a batch are G samples of one prompt. What a critic would
expect of a response is what the others of its group got.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import (
    PolicyExperience,
    Prompts,
    Rollout,
    Scored,
    Sequences,
)
from rlhf_jax.algorithms.grpo.experience import group_experience
from rlhf_jax.algorithms.grpo.recipe import (
    GRPO,
    PUBLISHED,
    REINFORCE_PLUS_PLUS,
    RLOO,
    GroupRecipe,
)
from rlhf_jax.algorithms.policy_gradient import iteration as policy_gradient
from rlhf_jax.algorithms.policy_gradient import update as policy_update
from rlhf_jax.algorithms.policy_gradient.iteration import Reward
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.algorithms.state import LossFunction, TrainState
from rlhf_jax.functional import masked
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.model import Scores

__all__ = [
    "GRPO",
    "PUBLISHED",
    "REINFORCE_PLUS_PLUS",
    "RLOO",
    "GroupRecipe",
    "group_experience",
    "iteration",
    "learn",
    "sample",
    "update",
]

Array = jax.Array
Params = Any


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
    scored, state, kl_coef, stats = policy_gradient.price(
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
    return state, update_stats | stats | group_stats, scored


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
