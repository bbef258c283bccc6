"""Experience -> TrainState: the PPO update, and the whole iteration as one function.

    rollout ─> reward ─> learn = make_experience ─> update
    └─────────────────── iteration ──────────────────────┘

`iteration` is for rewards that run in JAX. A reward that runs on the host stands
between two programs, `sample` and `learn`. A critic on devices of its own has programs
of its own (`critic_apart`). All ways give the same numbers, as long as gradients are
finite.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Experience, Prompts, Rollout, Scored, Sequences
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient import iteration as policy_gradient
from rlhf_jax.algorithms.policy_gradient import update as policy_update
from rlhf_jax.algorithms.policy_gradient.iteration import Reward
from rlhf_jax.algorithms.ppo import experience as experience_
from rlhf_jax.algorithms.ppo.loss import ppo_loss, whitened
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.algorithms.state import LossFunction, Optimizer, TrainState
from rlhf_jax.functional import losses, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles import adapted
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.model import Scores

__all__ = [
    "PPO",
    "Reward",
    "iteration",
    "judged",
    "learn",
    "make_experience",
    "ppo_loss",
    "sample",
    "shuffle_key",
    "update",
    "update_policy",
    "values",
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
    ppo: PPO,
    base: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats, Scored]:
    """One PPO iteration: answer the prompts, score the answers, learn from them.

    Maximises E[reward(x, y)] - β·KL(π ‖ π_ref).

    Args:
      state: donated by the caller's `jit`.
      prompts: Prompts[B, P].
      reference: the frozen policy; None takes no KL at all.
      reward: rollout -> f32[B] or `rewards.Scores`, in JAX.
      key: of this step, `fold_in(root, step)`.
      ppo: static.
      base: with `ppo.lora` what the state's adapters adapt, and mostly the reference
        too; never donated, nothing flows into it. None without.
      ptx: Sequences[M, S'], texts whose language-model loss is mixed in with
        `ppo.ptx_coef`, shared out over the minibatches of an epoch.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout for the
      record, its scores as the advantages saw them.

    Raises:
      InputError: batch sizes do not divide, the reward is not one number a row, or
        there is one of `base` and `ppo.lora`, or of `ptx` and `ppo.ptx_coef`, without
        the other.
    """
    rollout = sample(state.policy, prompts=prompts, key=key, ppo=ppo, base=base)
    return learn(
        state,
        rollout=rollout,
        scores=reward(judged(rollout, ppo=ppo)),
        reference=reference,
        key=key,
        ppo=ppo,
        base=base,
        ptx=ptx,
    )


def sample(
    policy: Params,
    *,
    prompts: Prompts,
    key: Array,
    ppo: PPO,
    base: Frozen | None = None,
) -> Rollout:
    """The rollout of an iteration, under the first of the two keys split from `key`.

    Args, Raises: as `iteration`, with the policy's parameters or adapters.
    """
    return policy_gradient.sample(
        policy, prompts=prompts, key=key, algorithm=ppo, base=base
    )


def judged(rollout: Rollout, *, ppo: PPO) -> Rollout:
    """What a reward is to see of the rollout of `sample`: mostly the same."""
    return policy_gradient.judged(rollout, algorithm=ppo)


def values(
    state: TrainState, *, rollout: Rollout, ppo: PPO, base: Frozen | None = None
) -> Array:
    """The critic's values of a rollout, f32[B, S]: `learn`'s own step.

    As a program by itself it runs while the host computes the scores.
    """
    return score.response_values(
        _critic(state, ppo=ppo, base=base),
        rollout=rollout,
        model=ppo.critic_model,
        max_new_tokens=ppo.max_new_tokens,
        after_stop=ppo.value_after_stop,
    )


def _critic(state: TrainState, *, ppo: PPO, base: Frozen | None) -> Params:
    if ppo.shared_trunk:
        trunk = adapted.params(state.policy, base=base, lora=ppo.lora)
        return {"trunk": trunk, "score": state.critic["score"]}
    return adapted.params(state.critic, base=base, lora=ppo.lora)


def learn(
    state: TrainState,
    *,
    rollout: Rollout,
    scores: Array | Scores,
    reference: Frozen | None,
    key: Array,
    ppo: PPO,
    ref_logprobs: Array | None = None,
    values: Array | None = None,
    base: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats, Scored]:
    """An iteration from the scores on; `iteration` with the reward taken out.

    Args, Returns, Raises: as `iteration`, with the rollout of `sample` and the scores
    of what was `judged` of it, f32[B], reward units, or `rewards.Scores`, whose parts
    are logged as `reward/NAME`; ref_logprobs as `score.score`; values of `values`, None
    takes them here.

    In a step that does not take the KL (`Lifecycle.prices`) both `reference` and
    `ref_logprobs` are None: a program of its own, without the penalty and its metrics.
    """
    state, experience, stats, scored = make_experience(
        state,
        rollout=rollout,
        scores=scores,
        reference=reference,
        ppo=ppo,
        ref_logprobs=ref_logprobs,
        values=values,
        base=base,
    )
    state, update_stats = update(
        state,
        experience=experience,
        key=shuffle_key(key),
        ppo=ppo,
        base=base,
        reference=reference,
        ptx=ptx,
    )
    return state, update_stats | stats, scored


def shuffle_key(key: Array) -> Array:
    """The key of `update` in the iteration of `key`: the second of the two split."""
    return jax.random.split(key)[1]


def make_experience(
    state: TrainState,
    *,
    rollout: Rollout,
    scores: Array | Scores,
    reference: Frozen | None,
    ppo: PPO,
    ref_logprobs: Array | None = None,
    values: Array | None = None,
    base: Frozen | None = None,
) -> tuple[TrainState, Experience, masked.Stats, Scored]:
    """`learn` up to its update: what the updates of an iteration read.

    Args, Raises: as `learn`; and InputError where neither values nor a critic are
      there.

    Returns:
      The state with the moments of these scores in, Experience[B, S], stats and the
      scored rollout.
    """
    critic = None
    if values is None:
        if state.critic is None:
            raise InputError(
                "expected values where the critic is apart from the state, got none; "
                "pass those of critic_apart.values"
            )
        critic = _critic(state, ppo=ppo, base=base)
    scored, state, kl_coef, stats = policy_gradient.price(
        state,
        rollout=rollout,
        scores=scores,
        reference=reference,
        algorithm=ppo,
        critic=policy_gradient.Critic(critic, ppo.critic_model, ppo.value_after_stop),
        ref_logprobs=ref_logprobs,
        values=values,
        base=base,
    )
    experience = experience_.experience(
        scored,
        kl_coef=kl_coef,
        gamma=ppo.gamma,
        lam=ppo.lam,
        whiten_rewards=ppo.whiten_rewards,
        whiten_advantages=ppo.whiten_advantages,
        whiten_ddof=ppo.whiten_ddof,
        value_after_stop=ppo.value_after_stop,
    )
    stats |= losses.explained_variance(
        values=experience.old_values,
        returns=experience.returns,
        mask=experience.response_mask,
    )
    return state, experience, stats, scored


def update(
    state: TrainState,
    *,
    experience: Experience,
    key: Array,
    ppo: PPO,
    base: Frozen | None = None,
    reference: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats]:
    """Epochs over reshuffled minibatches, one optimizer step each, in one program.

    Args:
      state: donated by the caller's `jit`.
      experience: Experience[B, S].
      key: shuffles; epoch e uses fold_in(key, e).
      ppo: static.
      base, ptx: as `iteration`.
      reference: read for exact KL in the loss alone.

    Returns, Raises: as `policy_gradient.update.update`.
    """
    return _update(
        state,
        experience=experience,
        key=key,
        ppo=ppo,
        critic_optimizer=ppo.critic_optimizer,
        base=base,
        reference=reference,
        ptx=ptx,
    )


def update_policy(
    state: TrainState,
    *,
    experience: Experience,
    key: Array,
    ppo: PPO,
    base: Frozen | None = None,
    reference: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats]:
    """`update` of a state without a critic, beside `critic_apart.update`.

    Args, Returns: as `update`.

    Raises:
      InputError: as `update`, and as `PPO.refuse_critic_apart`.
    """
    ppo.refuse_critic_apart()
    return _update(
        state,
        experience=experience,
        key=key,
        ppo=ppo,
        critic_optimizer=None,
        base=base,
        reference=reference,
        ptx=ptx,
    )


def _update(
    state: TrainState,
    *,
    experience: Experience,
    key: Array,
    ppo: PPO,
    critic_optimizer: Optimizer | None,
    base: Frozen | None,
    reference: Frozen | None,
    ptx: Sequences | None,
) -> tuple[TrainState, masked.Stats]:
    kl_coef = policy_update.kl_coef(state, algorithm=ppo)

    def loss_of(minibatch: Experience) -> tuple[Experience, LossFunction]:
        minibatch = whitened(minibatch, ppo=ppo)
        mask, value_mask = minibatch.response_mask, minibatch.value_mask
        loss = functools.partial(
            ppo_loss,
            kl_coef=kl_coef,
            num_tokens=mask.sum(dtype=jnp.float32),
            num_values=value_mask.sum(dtype=jnp.float32),
            num_responses=mask.any(axis=1).sum(dtype=jnp.float32),
            ppo=ppo,
            base=base,
            reference=reference,
        )
        return minibatch, lambda trained, part: loss(*trained, experience=part)

    return policy_update.update(
        state,
        experience=experience,
        key=key,
        algorithm=ppo,
        loss_of=loss_of,
        critic_optimizer=critic_optimizer,
        base=base,
        ptx=ptx,
        hold_policy=state.step < ppo.critic_warmup,
    )
