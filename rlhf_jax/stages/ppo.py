"""Experience -> TrainState: the PPO update, and the whole iteration as one function.

    rollout ─> reward ─> learn = score ─> experience ─> update
    └───────────────────── iteration ────────────────────────┘

`iteration` is for rewards that run in JAX. A reward that runs on the host stands
between two programs, `sample` and `learn`. Both ways give the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import losses, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles import adapted, rewards
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.stages import experience as experience_
from rlhf_jax.stages import ppo_update, score_shaping
from rlhf_jax.stages import rollout as rollout_
from rlhf_jax.stages import score as score_
from rlhf_jax.stages.batch import Prompts, Rollout, Scored, Sequences
from rlhf_jax.stages.ppo_config import PPO
from rlhf_jax.stages.ppo_loss import mean_distance, ppo_loss
from rlhf_jax.stages.ppo_update import update
from rlhf_jax.stages.state import TrainState

__all__ = ["PPO", "iteration", "judged", "learn", "ppo_loss", "sample", "update"]

Array = jax.Array
Params = Any
# rollout -> f32[B]; a pytree (`rewards.from_model`) if it holds parameters.
Reward = Callable[[Rollout], Array]


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
      reward: rollout -> f32[B], in JAX.
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
    ppo.minibatch_size(prompts.tokens.shape[0])  # before any work is done in vain
    sample_key, _ = jax.random.split(key)
    rollout = rollout_.rollout(
        adapted.params(policy, base=base, lora=ppo.lora),
        model=ppo.model,
        prompts=prompts,
        key=sample_key,
        max_new_tokens=ppo.max_new_tokens,
        stop_ids=() if ppo.fixed_length else ppo.stop_ids,
        temperature=ppo.temperature,
    )
    if not ppo.fixed_length or ppo.truncate_reward_only:
        return rollout
    return rollout_.truncate(rollout, stop_ids=ppo.stop_ids, after=ppo.truncate_after)


def judged(rollout: Rollout, *, ppo: PPO) -> Rollout:
    """What a reward is to see of the rollout of `sample`: mostly the same.

    With `ppo.truncate_reward_only` the responses end at their first stop token here,
    while the policy is trained on all they have.
    """
    if not ppo.truncate_reward_only:
        return rollout
    return rollout_.truncate(rollout, stop_ids=ppo.stop_ids, after=ppo.truncate_after)


def learn(
    state: TrainState,
    *,
    rollout: Rollout,
    scores: Array,
    reference: Frozen | None,
    key: Array,
    ppo: PPO,
    ref_logprobs: Array | None = None,
    base: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats, Scored]:
    """An iteration from the scores on; `iteration` with the reward taken out.

    Args, Returns, Raises: as `iteration`, with the rollout of `sample` and the scores
    f32[B], reward units, of what was `judged` of it; ref_logprobs as `score.score`.

    In a step that does not take the KL (`Lifecycle.prices`) both `reference` and
    `ref_logprobs` are None: a program of its own, without the penalty and its metrics.
    """
    rows = rollout.tokens.shape[0]
    if scores.shape != (rows,):
        raise InputError(
            f"expected the reward to return {rows} numbers, one a response, got shape "
            f"{scores.shape}"
        )
    _, shuffle_key = jax.random.split(key)
    params = adapted.params(state.policy, base=base, lora=ppo.lora)
    # A batch with a score that is not finite does not count: a NaN would stay.
    moments = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(scores).all(), new, old),
        rewards.update_moments(state.scores, scores),
        state.scores,
    )
    seen = judged(rollout, ppo=ppo)
    shaped = score_shaping.shape(
        scores,
        moments=moments,
        rollout=seen,
        stop_ids=ppo.stop_ids,
        shaping=ppo.scores,
    )
    priced = rollout
    if ppo.reprice:
        priced = rollout_.reprice(
            rollout,
            params,
            model=ppo.model,
            max_new_tokens=ppo.max_new_tokens,
            temperature=ppo.temperature,
        )
    if ppo.shared_trunk:
        critic = {"trunk": params, "score": state.critic["score"]}
    else:
        critic = adapted.params(state.critic, base=base, lora=ppo.lora)
    scored = score_.score(
        priced,
        scores=shaped,
        reference=reference,
        model=ppo.model,
        critic=critic,
        critic_model=ppo.critic_model,
        max_new_tokens=ppo.max_new_tokens,
        temperature=ppo.temperature,
        penalty=ppo.penalty,
        policy=params,
        ref_logprobs=ref_logprobs,
        value_after_stop=ppo.value_after_stop,
    )
    kl_coef = ppo_update.kl_coef(state, ppo=ppo)
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
    stats = experience_.objective_stats(
        dataclasses.replace(scored, scores=scores),  # as the reward gave them
        kl_coef=kl_coef,
        ended=score_.ended(seen, stop_ids=ppo.stop_ids),
    )
    stats |= losses.explained_variance(
        values=experience.old_values,
        returns=experience.returns,
        mask=experience.response_mask,
    )
    state = dataclasses.replace(state, scores=moments)
    state, update_stats = update(
        state,
        experience=experience,
        key=shuffle_key,
        ppo=ppo,
        base=base,
        reference=reference,
        ptx=ptx,
    )
    if ppo.reprice:  # the update compared the trainer with itself
        update_stats["policy/sampler_mismatch"] = mean_distance(
            priced.old_logprobs, rollout.old_logprobs, mask=rollout.response_mask
        )
    return state, stats | update_stats, scored
