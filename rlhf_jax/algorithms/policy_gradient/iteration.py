"""From prompts to the next state: the iteration of every policy gradient.

    sample ─> reward ─> learn = make_experience ─> update
    └───────────────────── iteration ──────────────────┘

`iteration` is for rewards that run in JAX. A reward that runs on the host stands
between two programs, `sample` and `learn`. A critic on devices of its own has programs
of its own (`ppo.critic_apart`). All ways give the same numbers, as long as gradients
are finite.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rlhf_jax.algorithms import batch, flow
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.sampler_mismatch import corrected, recomputed
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import masked
from rlhf_jax.roles import adapted, rewards
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.further import References

Array = jax.Array
Params = Any


def iteration(
    state: TrainState,
    *,
    prompts: batch.Prompts,
    reference: Frozen | None,
    reward: rewards.Reward,
    key: Array,
    recipe: PolicyGradient,
    base: Frozen | None = None,
    ptx: batch.Sequences | None = None,
    further: References | None = None,
) -> tuple[TrainState, masked.Stats, batch.Scored]:
    """One iteration: respond to the prompts, score the responses, learn from them.

    Maximises E[reward(x, y)] - β·(KL(π ‖ π_ref) + Σ_i w_i·KL(π ‖ π_i)), i over the
    further references.

    Args:
      state: of `state.ppo_state` or `state.grpo_state`; donated by the caller's `jit`.
      prompts: Prompts[B, P]; `recipe.rows_per_prompt` neighbouring rows of each prompt.
      reference: the frozen policy; None takes no KL at all.
      reward: rollout -> f32[B] or `rewards.Scores`, reward units, in JAX.
      key: of this step, `fold_in(root, step)`.
      recipe: static, a `ppo.PPO`, a `grpo.GRPO` or another `PolicyGradient`.
      base: what adapters adapt, with `recipe.lora`; never donated. None without.
      ptx: Sequences[M, S'], texts for `recipe.ptx_coef`, shared out over minibatches.
      further: references beside the first, by name; None is none.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout for the
      record, with the scores that the advantages were computed from.

    Raises:
      InputError: batch sizes or groups do not divide, the reward is not one number a
        row, or `base` is without `recipe.lora`, `ptx` without `ptx_coef`, or reverse.
    """
    rollout = sample(
        state.policy,
        prompts=prompts,
        key=key,
        recipe=recipe,
        base=base,
        version=state.step,
    )
    return learn(
        state,
        rollout=rollout,
        scores=reward(seen_by_reward(rollout, recipe=recipe)),
        reference=reference,
        key=key,
        recipe=recipe,
        base=base,
        ptx=ptx,
        further=further,
    )


def sample(
    policy: Params,
    *,
    prompts: batch.Prompts,
    key: Array,
    recipe: PolicyGradient,
    base: Frozen | None = None,
    version: Array | None = None,
) -> batch.Rollout:
    """The rollout of an iteration.

    Args:
      policy: the policy's parameters, or its adapters of `base`.
      prompts: Prompts[B, P]; a prompt in `recipe.rows_per_prompt` rows is run once.
      key: of this step; the sampler takes the first of the two keys split from it.
      recipe: static.
      base: what adapters adapt, with `recipe.lora`; None without adapters.
      version: i32[], of the policy, `TrainState.step`; None stamps no token.

    Returns:
      Rollout[B, P + R], R = `recipe.max_new_tokens`.

    Raises:
      InputError: batch sizes or groups do not divide.
    """
    recipe.minibatch_size(prompts.tokens.shape[0])  # before any work is done in vain
    sample_key, _ = jax.random.split(key)
    rollout = flow.rollout.rollout(
        adapted.params(policy, base=base, lora=recipe.lora),
        model=recipe.model,
        prompts=prompts,
        key=sample_key,
        max_new_tokens=recipe.max_new_tokens,
        stop_ids=() if recipe.fixed_length else recipe.stop_ids,
        temperature=recipe.temperature,
        group_size=recipe.rows_per_prompt,
        continuous_batching=recipe.continuous_batching,
        version=version,
    )
    whole = not recipe.fixed_length or recipe.truncate_reward_only
    return rollout if whole else _truncated(rollout, recipe)


def seen_by_reward(rollout: batch.Rollout, *, recipe: PolicyGradient) -> batch.Rollout:
    """What the reward sees of a rollout of `sample`: all of it, unless it is cut here.

    With `recipe.truncate_reward_only` responses end at their first stop token, while
    the policy is trained on all their tokens.
    """
    return _truncated(rollout, recipe) if recipe.truncate_reward_only else rollout


def _truncated(rollout: batch.Rollout, recipe: PolicyGradient) -> batch.Rollout:
    """The rollout with responses that end at their first stop token."""
    return flow.rollout.truncate(
        rollout, stop_ids=recipe.stop_ids, after=recipe.truncate_after
    )


def learn(
    state: TrainState,
    *,
    rollout: batch.Rollout,
    scores: Array | rewards.Scores,
    reference: Frozen | None,
    key: Array,
    recipe: PolicyGradient,
    ref_logprobs: Array | None = None,
    values: Array | None = None,
    base: Frozen | None = None,
    ptx: batch.Sequences | None = None,
    packing: batch.RolloutPacking | None = None,
    further: References | None = None,
) -> tuple[TrainState, masked.Stats, batch.Scored]:
    """The part of an iteration that follows the reward.

    Args:
      state: donated by the caller's `jit`.
      rollout: Rollout[B, S], of `sample`.
      scores: f32[B], reward units, of what `seen_by_reward` returned for the rollout;
        or `rewards.Scores`, whose parts are logged as `reward/NAME`.
      reference: the frozen policy; None takes no KL, and logs no metric of it.
      key: of this step, the one that `sample` took.
      recipe: static.
      base: what adapters adapt, with `recipe.lora`; None without adapters.
      ptx: Sequences[M, S'], texts for `recipe.ptx_coef`; None mixes none in.
      ref_logprobs: f32[B, S], nats; None computes them here, if there is a reference.
      values: f32[B, S], reward units, of `ppo.values`; None computes them here.
      packing: how the models read this rollout packed (`data.layouts`); None pads it.
      further: references beside the first, with their log-probs where those ran before.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout.

    Raises:
      InputError: sizes do not divide, or scores, base, ptx or critic do not fit.
    """
    state, experience, stats, scored = make_experience(
        state,
        rollout=rollout,
        scores=scores,
        reference=reference,
        recipe=recipe,
        ref_logprobs=ref_logprobs,
        values=values,
        base=base,
        packing=packing,
        further=further,
    )
    state, update_stats = update(
        state,
        experience=experience,
        key=shuffle_key(key),
        recipe=recipe,
        base=base,
        reference=reference,
        ptx=ptx,
        packing=packing,
        further=further,
    )
    return state, masked.merge_stats(stats, update_stats), scored


def make_experience(
    state: TrainState,
    *,
    rollout: batch.Rollout,
    scores: Array | rewards.Scores,
    reference: Frozen | None,
    recipe: PolicyGradient,
    ref_logprobs: Array | None = None,
    values: Array | None = None,
    base: Frozen | None = None,
    packing: batch.RolloutPacking | None = None,
    further: References | None = None,
) -> tuple[TrainState, batch.PolicyExperience, masked.Stats, batch.Scored]:
    """What the updates of an iteration read.

    Args:
      state: donated by the caller's `jit`; without a critic if there are `values`.
      rollout: Rollout[B, S], of `sample`.
      scores: f32[B], reward units, or `rewards.Scores`.
      reference: the frozen policy; None takes no KL at all.
      recipe: static.
      ref_logprobs: f32[B, S], nats; None computes them here, if there is a reference.
      values: f32[B, S], reward units; None computes them here.
      base: what adapters adapt, with `recipe.lora`; None without adapters.
      packing: how the models read this rollout packed; None reads it padded.
      further: references beside the first, by name.

    Returns:
      The state with these scores in its moments, the experience [B, S] of the
      algorithm, stats {name: (sum, weight)} and the scored rollout.

    Raises:
      InputError: the scores are not one per row, PPO has neither values nor critic, or
        the recipe is of responses of one turn and there are rewards of several.
    """
    critic = None if values is not None else recipe.critic_of(state, base=base)
    of_batch = None if packing is None else packing.batch
    returned = rewards.scores_of(scores, rows=rollout.tokens.shape[0])
    recipe.refuse_turns(returned.turns)
    began = None  # an episode may not have, in time; its 0 is no score
    if returned.turns is not None:
        began = rollout.response_mask.any(axis=1)
    moments = flow.shaping.next_moments(state.scores, returned.total, kept=began)
    rewarded = seen_by_reward(rollout, recipe=recipe)
    shaped = flow.shaping.shape(
        returned.total,
        moments=moments,
        rollout=rewarded,
        stop_ids=recipe.stop_ids,
        shaping=recipe.scores,
    )
    params = adapted.params(state.policy, base=base, lora=recipe.lora)
    rollout = recomputed(rollout, params, recipe=recipe, packing=of_batch)
    scoring: dict[str, Any] = {
        "model": recipe.model,
        "max_new_tokens": recipe.max_new_tokens,
        "temperature": recipe.temperature,
        "penalty": recipe.penalty,
        "policy": params,
        "packing": of_batch,
    }
    scored = flow.score.score(
        rollout,
        scores=shaped,
        reference=reference,
        critic=None if critic is None else critic.params,
        critic_model=None if critic is None else critic.model,
        ref_logprobs=ref_logprobs,
        values=values,
        value_after_stop=critic is not None and critic.after_stop,
        turn_rewards=returned.turns,
        **scoring,
    )
    scored, beside = flow.further.add(scored, further=further or {}, **scoring)
    kl_coef = recipe.kl_coef(state)
    experience, experience_stats = recipe.experience(scored, kl_coef=kl_coef)
    experience, weight_stats = corrected(
        dataclasses.replace(experience, further=beside),
        rollout=rollout,
        step=state.step,
        recipe=recipe,
    )
    ended = flow.score.ended(rewarded, stop_ids=recipe.stop_ids)
    stats = masked.merge_stats(
        weight_stats,
        flow.objective.objective_stats(
            recipe.reported(dataclasses.replace(scored, scores=returned.total)),
            kl_coef=kl_coef,
            ended=recipe.reported(ended),
        ),
        rewards.part_stats(recipe.reported(returned)),
        experience_stats,
    )
    return dataclasses.replace(state, scores=moments), experience, stats, scored
