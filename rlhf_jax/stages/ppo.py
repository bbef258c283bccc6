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
import optax

from rlhf_jax.functional import kl as kl_
from rlhf_jax.functional import losses, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles import adapted, rewards
from rlhf_jax.roles import critic as critic_
from rlhf_jax.roles import policy as policy_
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.roles.rewards import RunningMoments
from rlhf_jax.stages import experience as experience_
from rlhf_jax.stages import rollout as rollout_
from rlhf_jax.stages import score as score_
from rlhf_jax.stages import state as state_
from rlhf_jax.stages.batch import Experience, Prompts, Rollout, Scored
from rlhf_jax.stages.ppo_config import PPO
from rlhf_jax.stages.state import TrainState

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

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout for the
      record, its scores as the advantages saw them.

    Raises:
      InputError: batch sizes do not divide, the reward is not one number a row, or
        there is one of `base` and `ppo.lora` without the other.
    """
    rollout = sample(state.policy, prompts=prompts, key=key, ppo=ppo, base=base)
    return learn(
        state,
        rollout=rollout,
        scores=reward(rollout),
        reference=reference,
        key=key,
        ppo=ppo,
        base=base,
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
    return rollout_.rollout(
        adapted.params(policy, base=base, lora=ppo.lora),
        model=ppo.model,
        prompts=prompts,
        key=sample_key,
        max_new_tokens=ppo.max_new_tokens,
        stop_ids=ppo.stop_ids,
        temperature=ppo.temperature,
    )


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
) -> tuple[TrainState, masked.Stats, Scored]:
    """An iteration from the scores on; `iteration` with the reward taken out.

    Args, Returns, Raises: as `iteration`, with the rollout of `sample` and its scores
    f32[B], reward units; ref_logprobs as `score.score`.

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
    kl_coef = ppo.lifecycle.kl_scale * state.kl.kl_coef
    used, moments = _used_scores(state.scores, scores=scores, rollout=rollout, ppo=ppo)
    priced = rollout
    if ppo.reprice:
        priced = rollout_.reprice(
            rollout,
            adapted.params(state.policy, base=base, lora=ppo.lora),
            model=ppo.model,
            max_new_tokens=ppo.max_new_tokens,
            temperature=ppo.temperature,
        )
    scored = score_.score(
        priced,
        scores=used,
        reference=reference,
        model=ppo.model,
        critic=adapted.params(state.critic, base=base, lora=ppo.lora),
        critic_model=ppo.critic_model,
        max_new_tokens=ppo.max_new_tokens,
        temperature=ppo.temperature,
        kl_estimator=ppo.kl_estimator,
        ref_logprobs=ref_logprobs,
    )
    experience = experience_.experience(
        scored,
        kl_coef=kl_coef,
        gamma=ppo.gamma,
        lam=ppo.lam,
        whiten_advantages=ppo.whiten_advantages,
    )
    stats = experience_.objective_stats(
        dataclasses.replace(scored, scores=scores),  # as the reward gave them
        kl_coef=kl_coef,
        ended=score_.ended(rollout, stop_ids=ppo.stop_ids),
    )
    stats |= losses.explained_variance(
        values=experience.old_values,
        returns=experience.returns,
        mask=experience.response_mask,
    )
    state = dataclasses.replace(state, scores=moments)
    state, update_stats = update(
        state, experience=experience, key=shuffle_key, ppo=ppo, base=base
    )
    if ppo.reprice:  # the update compared the trainer with itself
        update_stats["policy/sampler_mismatch"] = _mean_distance(
            priced.old_logprobs, rollout.old_logprobs, mask=rollout.response_mask
        )
    return state, stats | update_stats, scored


def _used_scores(
    moments: RunningMoments, *, scores: Array, rollout: Rollout, ppo: PPO
) -> tuple[Array, RunningMoments]:
    """The scores that go into the rewards, and the moments with them counted in."""
    # A batch with a score that is not finite is skipped, so it does not count either.
    moments = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(scores).all(), new, old),
        rewards.update_moments(moments, scores),
        moments,
    )
    if ppo.normalise_scores:
        scores = (scores - moments.mean) * jax.lax.rsqrt(moments.variance + 1e-8)
    if ppo.missing_stop_score is not None:
        scores = score_.penalise_missing_stop(
            scores, rollout=rollout, stop_ids=ppo.stop_ids, score=ppo.missing_stop_score
        )
    return scores, moments


def update(
    state: TrainState,
    *,
    experience: Experience,
    key: Array,
    ppo: PPO,
    base: Frozen | None = None,
) -> tuple[TrainState, masked.Stats]:
    """Epochs over reshuffled minibatches, one optimizer step each, in one program.

    Args:
      state: donated by the caller's `jit`.
      experience: Experience[B, S].
      key: shuffles; epoch e uses fold_in(key, e).
      ppo: static.
      base: as `iteration`.

    Returns:
      The state of the next iteration and stats over all minibatches. A minibatch whose
      gradient is not finite changes nothing but `state.skipped`.
      `policy/sampler_mismatch` is mean |log π_trainer - log π_sampler| over the first
      minibatch, before anything has moved, nats per token.

    Raises:
      InputError: batch sizes do not divide, or as `adapted.params`.
    """
    rows = experience.tokens.shape[0]
    minibatch_size = ppo.minibatch_size(rows)

    def shuffled(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), rows)

    order = jax.vmap(shuffled)(jnp.arange(ppo.num_epochs))

    def step(state: TrainState, chosen: Array) -> tuple[TrainState, masked.Stats]:
        minibatch = jax.tree.map(lambda leaf: leaf[chosen], experience)
        return _step(state, minibatch=minibatch, ppo=ppo, base=base)

    state, stats = jax.lax.scan(step, state, order.reshape(-1, minibatch_size))
    first = jax.tree.map(lambda leaf: leaf[0], stats["policy/sampler_mismatch"])
    stats = masked.total_stats(stats) | {"policy/sampler_mismatch": first}
    seen = None
    if experience.ref_logprobs is not None:
        seen = kl_.k1(experience.old_logprobs, experience.ref_logprobs)
        seen = masked.masked_sum(seen, mask=experience.response_mask) / rows
    kl = state.kl.update(kl=seen, num_episodes=rows * ppo.lifecycle.kl_every)
    return dataclasses.replace(state, kl=kl, step=state.step + 1), stats


def _step(
    state: TrainState, *, minibatch: Experience, ppo: PPO, base: Frozen | None
) -> tuple[TrainState, masked.Stats]:
    mask = minibatch.response_mask
    if ppo.whiten_advantages == "minibatch":
        whitened = masked.masked_whiten(minibatch.advantages, mask=mask)
        minibatch = dataclasses.replace(minibatch, advantages=whitened)
    num_tokens = mask.sum(dtype=jnp.float32)

    def loss(
        trained: tuple[Params, Params], part: Experience
    ) -> tuple[Array, masked.Stats]:
        return ppo_loss(
            *trained, experience=part, num_tokens=num_tokens, ppo=ppo, base=base
        )

    (policy_grads, critic_grads), stats = state_.accumulate(
        loss,
        (state.policy, state.critic),
        minibatch,
        micro_batch_size=ppo.micro_batch_size,
    )
    policy_norm = optax.tree.norm(policy_grads)
    critic_norm = optax.tree.norm(critic_grads)
    finite = jnp.isfinite(policy_norm) & jnp.isfinite(critic_norm)
    stats |= {
        "policy/grad_norm": (policy_norm, jnp.ones_like(policy_norm)),
        "critic/grad_norm": (critic_norm, jnp.ones_like(critic_norm)),
    }
    policy, policy_opt = state_.apply_gradients(
        state.policy,
        state.policy_opt,
        policy_grads,
        optimizer=ppo.policy_optimizer,
        finite=finite,
    )
    critic, critic_opt = state_.apply_gradients(
        state.critic,
        state.critic_opt,
        critic_grads,
        optimizer=ppo.critic_optimizer,
        finite=finite,
    )
    skipped, stats = state_.count_skips(state.skipped, stats, finite=finite)
    state = dataclasses.replace(
        state,
        policy=policy,
        policy_opt=policy_opt,
        critic=critic,
        critic_opt=critic_opt,
        skipped=skipped,
    )
    return state, stats


def ppo_loss(
    policy: Params,
    critic: Params,
    *,
    experience: Experience,
    num_tokens: Array,
    ppo: PPO,
    base: Frozen | None = None,
) -> tuple[Array, masked.Stats]:
    """policy_loss + vf_coef · value_loss of a (micro-)batch.

    Args:
      policy, critic: parameters, or adapters of `base`; the gradient reaches both,
        and nothing else.
      experience: Experience[b, S].
      num_tokens: f32[], response tokens of the whole minibatch.
      ppo: static.
      base: as `iteration`.

    Returns:
      f32[] and the stats of both losses and `policy/sampler_mismatch`.

    Raises:
      ValueError: there are no columns before the `max_new_tokens` of the response.
      InputError: as `adapted.params`.
    """
    mask = experience.response_mask
    logprobs = policy_.logprobs(
        adapted.params(policy, base=base, lora=ppo.lora),
        model=ppo.model,
        tokens=experience.tokens,
        mask=experience.mask,
        temperature=ppo.temperature,
        first_column=experience.tokens.shape[1] - ppo.max_new_tokens,
    )
    policy_loss, stats = losses.policy_loss(
        logprobs=logprobs,
        old_logprobs=experience.old_logprobs,
        advantages=experience.advantages,
        mask=mask,
        clip_range=ppo.clip_range,
        num_tokens=num_tokens,
    )
    values = critic_.values(
        adapted.params(critic, base=base, lora=ppo.lora),
        model=ppo.critic_model,
        tokens=experience.tokens,
        mask=experience.mask,
    )
    value_loss, value_stats = losses.value_loss(
        values=values,
        old_values=experience.old_values,
        returns=experience.returns,
        mask=mask,
        clip_range=ppo.value_clip_range,
        num_tokens=num_tokens,
    )
    stats["policy/sampler_mismatch"] = _mean_distance(
        jax.lax.stop_gradient(logprobs), experience.old_logprobs, mask=mask
    )
    return policy_loss + ppo.vf_coef * value_loss, stats | value_stats


def _mean_distance(left: Array, right: Array, *, mask: Array) -> tuple[Array, Array]:
    distance = masked.masked_sum(jnp.abs(left - right), mask=mask)
    return distance, mask.sum(dtype=jnp.float32)
