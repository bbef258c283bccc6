"""The iteration of every policy gradient, from prompts to the next state.

    sample ─> reward ─> learn = make_experience ─> update
    └───────────────────── iteration ──────────────────┘

`iteration` is for rewards that run in JAX. A reward on the host runs between two
programs, `sample` and `learn`. A critic on devices of its own has separate programs
(`ppo.critic_apart`). All of these give equal results while gradients are finite.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import batch, flow
from rlhf_jax.algorithms.policy_gradient import (
    algorithm,
    corrections,
    routing_replay,
)
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, adapted_params
from rlhf_jax.roles.rewards.scores import Reward, Scores, part_stats, scores_of

Array = jax.Array
Params = Any


def iteration(
    state: TrainState,
    *,
    prompts: batch.Prompts,
    frozen: FrozenModels,
    reward: Reward | None,
    key: Array,
    recipe: PolicyGradient,
    ptx: batch.Sequences | None = None,
) -> tuple[TrainState, masked.Stats, batch.Scored]:
    """One iteration: samples responses to the prompts, scores them and learns.

    Maximises E[reward(x, y)] - β·(KL(π ‖ π_ref) + Σ_i w_i·KL(π ‖ π_i)), i over the
    further references.

    Args:
      prompts: Prompts[B, P]; `recipe.rows_per_prompt` neighbouring rows of each prompt.
      reward: rollout -> f32[B] or `rewards.Scores`, reward units, in JAX; None scores
        every response 0.
      key: key of this step, `fold_in(root, step)`.
      recipe: static, a `ppo.PPO`, a `grpo.GRPO` or another `PolicyGradient`.
      ptx: Sequences[M, S'], texts for `recipe.ptx_coef`, divided over minibatches.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout for logging,
      with the scores that the advantages were computed from.

    Raises:
      InputError: batch sizes or groups do not divide, the reward is not one number per
        row, or only one is given of the base and `recipe.lora`, or of `ptx` and
        `ptx_coef`.
    """
    rollout = sample(
        state.policy,
        prompts=prompts,
        key=key,
        recipe=recipe,
        frozen=frozen,
        version=state.step,
    )
    scores = None
    if reward is not None:
        scores = reward(seen_by_reward(rollout, recipe=recipe))
    return learn(
        state,
        rollout=rollout,
        scores=scores,
        frozen=frozen,
        key=key,
        recipe=recipe,
        ptx=ptx,
    )


def sample(
    policy: Params,
    *,
    prompts: batch.Prompts,
    key: Array,
    recipe: PolicyGradient,
    frozen: FrozenModels = NO_MODELS,
    version: Array | None = None,
) -> batch.Rollout:
    """Samples the rollout of an iteration by `recipe.rollout`.

    Args:
      prompts: Prompts[B, P]; a prompt in `recipe.rows_per_prompt` rows is run once.
      key: key of this step; the sampler takes the first of two keys split from it.
      version: i32[], version of the policy, `TrainState.step`; None records none.
    """
    recipe.minibatch_size(prompts.tokens.shape[0])  # fail before sampling
    # `update` shuffles with the second key (`shuffle_key`): one key per step serves
    # both programs.
    sample_key, _ = jax.random.split(key)
    rollout = recipe.rollout(
        adapted_params(policy, base=frozen.base, lora=recipe.lora),
        prompts=prompts,
        key=sample_key,
        frozen=frozen,
        version=version,
    )
    # A truncation for the reward alone has to wait (`seen_by_reward`): the policy is
    # trained on this rollout.
    return rollout if recipe.truncates_reward_only else _truncated(rollout, recipe)


def seen_by_reward(rollout: batch.Rollout, *, recipe: PolicyGradient) -> batch.Rollout:
    """The part of a rollout of `sample` that the reward reads.

    With `recipe.truncates_reward_only` responses end at their first stop token here,
    while the policy is trained on all their tokens. Otherwise it is the whole rollout.
    """
    return _truncated(rollout, recipe) if recipe.truncates_reward_only else rollout


def _truncated(rollout: batch.Rollout, recipe: PolicyGradient) -> batch.Rollout:
    """The rollout with responses that end at their first stop token."""
    if recipe.fixed_length is None:  # sampling ended them there
        return rollout
    return flow.rollout.truncate(
        rollout, stop_ids=recipe.stop_ids, after=recipe.fixed_length.truncate_after
    )


def learn(
    state: TrainState,
    *,
    rollout: batch.Rollout,
    scores: Array | Scores | None,
    frozen: FrozenModels,
    key: Array,
    recipe: PolicyGradient,
    ref_output: batch.ReferenceOutput | None = None,
    values: Array | None = None,
    ptx: batch.Sequences | None = None,
    packing: batch.RolloutPacking | None = None,
) -> tuple[TrainState, masked.Stats, batch.Scored]:
    """The part of an iteration after the reward.

    Args:
      scores: f32[B], reward units, of the rollout as `seen_by_reward` returns it; or
        `rewards.Scores`, whose parts are logged as `reward/NAME`; None scores every
        response 0.
      frozen: without a reference and `ref_output`, no KL is computed or logged.
      ref_output: results of the reference; None runs it here, if there is one.
      values: f32[B, S], reward units, from `ppo.values`; None computes them here.
      ptx: Sequences[M, S'], texts for `recipe.ptx_coef`; None mixes none in.
      packing: packed layout of this rollout (`data.layouts`); None reads padded rows.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout, in which rows
      of `Scores.left_out` have no response.
    """
    # Without this check values would replace the critic's forward pass, and the update
    # would silently train the policy alone.
    if recipe.critic is not None and values is not None and state.critic is None:
        raise InputError(
            "expected a state with a critic, as the recipe has one, got a state "
            "without a critic; with a critic apart call make_experience and update"
        )
    state, experience, stats, scored = make_experience(
        state,
        rollout=rollout,
        scores=scores,
        frozen=frozen,
        recipe=recipe,
        ref_output=ref_output,
        values=values,
        packing=packing,
        key=key,
    )
    state, update_stats = update(
        state,
        experience=experience,
        key=shuffle_key(key),
        recipe=recipe,
        frozen=frozen,
        ptx=ptx,
        packing=packing,
    )
    return state, masked.merge_stats(stats, update_stats), scored


def make_experience(
    state: TrainState,
    *,
    rollout: batch.Rollout,
    scores: Array | Scores | None,
    frozen: FrozenModels,
    recipe: PolicyGradient,
    ref_output: batch.ReferenceOutput | None = None,
    values: Array | None = None,
    packing: batch.RolloutPacking | None = None,
    key: Array | None = None,
) -> tuple[TrainState, batch.PolicyExperience, masked.Stats, batch.Scored]:
    """Makes the experience of an iteration's updates from its rollout and scores.

    Args:
      state: donated by the caller's `jit`; may lack the critic if there are `values`.
      key: of this step, as in `sample`; only Clip-Cov needs it.

    Returns:
      The state with these scores in its moments, the experience [B, S] of the
      algorithm, stats {name: (sum, weight)} and the scored rollout.

    Raises:
      InputError: the scores are not one per row, PPO has neither values nor critic, or
        rewards of several turns come with `fixed_length`.
    """
    # The layout of the whole batch: here models read all rows once.
    of_batch = None if packing is None else packing.batch
    rows = rollout.tokens.shape[0]
    if scores is None:
        scores = jnp.zeros(rows, jnp.float32)
    returned = scores_of(scores, rows=rows)
    recipe.refuse_turns(returned.turns)
    row_mask = None
    if returned.left_out is not None:
        row_mask = ~jnp.asarray(returned.left_out)
        # Select: a missing score may be NaN, and NaN times 0 is NaN.
        total = jnp.where(row_mask, returned.total, 0.0)
        returned = dataclasses.replace(returned, total=total)
        # Without tokens these rows drop out of everything that counts tokens.
        rollout = flow.rollout.leave_out(rollout, rows=~row_mask)
    # Before shaping: the moments that normalise a batch include it. Rows that are left
    # out, or that the policy did not sample, are not in them.
    moments = flow.shaping.next_moments(
        state.scores,
        recipe.reported(returned.total),
        row_mask=None if row_mask is None else recipe.reported(row_mask),
    )
    # Shaping penalises lengths and missing stops of the response that was scored.
    rewarded = seen_by_reward(rollout, recipe=recipe)
    shaping: dict[str, Any] = {
        "moments": moments,
        "rollout": rewarded,
        "stop_ids": recipe.stop_ids,
        "shaping": recipe.scores,
    }
    shaped = flow.shaping.shape(returned.total, **shaping)
    turn_rewards = returned.turns
    if turn_rewards is not None:
        turn_rewards = flow.shaping.shape_turns(
            turn_rewards, ends=returned.turn_ends, scores=returned.total, **shaping
        )
    # Adapters of LoRA are applied beside the frozen kernels, not merged into them.
    params = adapted_params(state.policy, base=frozen.base, lora=recipe.lora)
    if recipe.routing_replay is not None:
        rollout = routing_replay.recorded(
            rollout, params, recipe=recipe, packing=of_batch
        )
    reading: dict[str, Any] = {
        "model": recipe.model,
        "max_new_tokens": recipe.max_new_tokens,
        "temperature": recipe.temperature,
        "packing": of_batch,
    }
    # Before the KL, which reads `old_logprobs`: the trainer's if recomputed, else the
    # sampler's.
    if recipe.recomputes_logprobs:
        rollout = flow.rollout.recompute_logprobs(rollout, params, **reading)
    if values is None:
        values = algorithm.values(
            state, rollout=rollout, recipe=recipe, frozen=frozen, packing=packing
        )
    scoring: dict[str, Any] = {
        **reading,
        "penalty": recipe.penalty,
        "policy": params,
        "replays": recipe.reference_replays,
    }
    scored = flow.score.score(
        rollout,
        scores=shaped,
        reference=frozen.reference,
        ref_logprobs=None if ref_output is None else ref_output.logprobs,
        values=values,
        turn_rewards=turn_rewards,
        row_mask=row_mask,
        **scoring,
    )
    scored = dataclasses.replace(
        scored,
        turn_ends=returned.turn_ends,
        rewards=tuple(returned.parts[name] for name, _ in returned.weights),
        weights=tuple(weight for _, weight in returned.weights),
    )
    scored, further = flow.objective.add_further(
        scored, further=frozen.further, **scoring
    )
    # Before the update, which moves the controller: one β for the whole iteration.
    kl_coef = recipe.kl_coef(state)
    experience, experience_stats = recipe.experience(scored, kl_coef=kl_coef)
    if ref_output is not None and ref_output.taught is not None:
        # In the mask, so that divisors count only rows with a demonstration.
        taught = ref_output.taught[:, None] & experience.response_mask
        experience = dataclasses.replace(experience, response_mask=taught)
        share = masked.sum_stats(
            {"response/taught": ref_output.taught.astype(jnp.float32)},
            mask=jnp.ones(ref_output.taught.shape, bool),
        )
        experience_stats = experience_stats | share
    choice_stats, control_stats, weight_stats = {}, {}, {}
    # Before importance weights: Clip-Cov reads unweighted advantages.
    if recipe.token_choice is not None:
        from rlhf_jax.algorithms.policy_gradient import token_choice  # few runs

        experience, choice_stats = token_choice.choose(
            experience, rollout=rollout, key=key, choice=recipe.token_choice
        )
    if recipe.entropy_control is not None:
        from rlhf_jax.algorithms.policy_gradient import entropy_control  # few runs

        state, experience, control_stats = entropy_control.control(
            state,
            experience,
            rollout=recipe.reported(rollout),
            target=recipe.entropy_control,
        )
    ref_hidden = None
    # Costly, [B, S, D] in every minibatch: only distillation keeps it.
    if ref_output is not None and recipe.reads_ref_hidden:
        ref_hidden = ref_output.hidden
    # The rows that the policy itself drew (Nash-MD: half of them).
    rows = recipe.reported(jnp.arange(rollout.tokens.shape[0]))
    sampled = flow.ledger.entries(rollout, step=state.step, rows=rows)
    experience = dataclasses.replace(
        experience,
        further=further,
        ref_hidden=ref_hidden,
        # Online DPO puts two responses into a row; the ledger's entries follow.
        sampled=jax.tree.map(experience.laid_out, sampled),
        experts=rollout.experts,
        top_k=rollout.top_k,
    )
    # Otherwise `old_logprobs` are the sampler's, and the loss's own ratio corrects.
    if recipe.recomputes_logprobs:
        experience, weight_stats = corrections.corrected(
            experience, rollout=rollout, step=state.step, recipe=recipe
        )
    ended = flow.score.ended(rewarded, stop_ids=recipe.stop_ids)
    stats = masked.merge_stats(
        weight_stats,
        flow.objective.objective_stats(
            # The metric is the reward's own score, before shaping.
            recipe.reported(dataclasses.replace(scored, scores=returned.total)),
            kl_coef=kl_coef,
            ended=recipe.reported(ended),
        ),
        part_stats(recipe.reported(returned)),
        experience_stats,
        choice_stats,
        control_stats,
        flow.ledger.duplicates(rollout, rows=rows),
    )
    return dataclasses.replace(state, scores=moments), experience, stats, scored
