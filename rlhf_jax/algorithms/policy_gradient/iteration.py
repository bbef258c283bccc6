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
import jax.numpy as jnp

from rlhf_jax.algorithms import batch, flow
from rlhf_jax.algorithms.policy_gradient import (
    corrections,
    entropy_control,
    routing_replay,
    token_choice,
)
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient, critic_of
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
    """One iteration: respond to the prompts, score the responses, learn from them.

    Maximises E[reward(x, y)] - β·(KL(π ‖ π_ref) + Σ_i w_i·KL(π ‖ π_i)), i over the
    further references.

    Args:
      prompts: Prompts[B, P]; `recipe.rows_per_prompt` neighbouring rows of each prompt.
      reward: rollout -> f32[B] or `rewards.Scores`, reward units, in JAX; None scores
        every response 0.
      key: of this step, `fold_in(root, step)`.
      recipe: static, a `ppo.PPO`, a `grpo.GRPO` or another `PolicyGradient`.
      ptx: Sequences[M, S'], texts for `recipe.ptx_coef`, shared out over minibatches.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout for the
      record, with the scores that the advantages were computed from.

    Raises:
      InputError: batch sizes or groups do not divide, the reward is not one number a
        row, or there is one of the base and `recipe.lora`, or of `ptx` and `ptx_coef`,
        without the other.
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
    """The rollout of an iteration, as `recipe.rollout` draws it.

    Args:
      prompts: Prompts[B, P]; a prompt in `recipe.rows_per_prompt` rows is run once.
      key: of this step; the sampler takes the first of the two keys split from it.
      version: i32[], of the policy, `TrainState.step`; None stamps no token.
    """
    recipe.minibatch_size(prompts.tokens.shape[0])  # before any work is done in vain
    # `update` shuffles by the second of the two (`shuffle_key`): one key per step
    # serves both programs, and neither repeats the other's draws.
    sample_key, _ = jax.random.split(key)
    rollout = recipe.rollout(
        adapted_params(policy, base=frozen.base, lora=recipe.lora),
        prompts=prompts,
        key=sample_key,
        frozen=frozen,
        version=version,
    )
    # The policy is trained on what this rollout holds, so that only a cut for the
    # reward alone has to wait (`seen_by_reward`).
    return rollout if recipe.truncates_reward_only else _truncated(rollout, recipe)


def seen_by_reward(rollout: batch.Rollout, *, recipe: PolicyGradient) -> batch.Rollout:
    """What the reward sees of a rollout of `sample`: all of it, unless it is cut here.

    Where `recipe.truncates_reward_only` responses end at their first stop token, while
    the policy is trained on all their tokens.
    """
    return _truncated(rollout, recipe) if recipe.truncates_reward_only else rollout


def _truncated(rollout: batch.Rollout, recipe: PolicyGradient) -> batch.Rollout:
    """The rollout with responses that end at their first stop token."""
    if recipe.fixed_length is None:  # they do already
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
    """The part of an iteration that follows the reward.

    Args:
      scores: f32[B], reward units, of what `seen_by_reward` returned for the rollout;
        or `rewards.Scores`, whose parts are logged as `reward/NAME`; None scores every
        response 0.
      frozen: without a reference and `ref_output` no KL is taken, and none logged.
      ref_output: of the reference; None runs it here, if there is one.
      values: f32[B, S], reward units, of `ppo.values`; None computes them here.
      ptx: Sequences[M, S'], texts for `recipe.ptx_coef`; None mixes none in.
      packing: how the models read this rollout packed (`data.layouts`); None pads it.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout, in which what
      `Scores.left_out` names has no response.
    """
    # Such a state would pass: values replace the critic's forward pass, and the update
    # would then train the policy alone without a word.
    if recipe.critic is not None and values is not None and state.critic is None:
        raise InputError(
            "expected a state with the critic of its recipe, got one with no critic "
            "where it has one; beside a critic apart call make_experience and update"
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
) -> tuple[TrainState, batch.PolicyExperience, masked.Stats, batch.Scored]:
    """What the updates of an iteration read.

    Args:
      state: donated by the caller's `jit`; without a critic if there are `values`.

    Returns:
      The state with these scores in its moments, the experience [B, S] of the
      algorithm, stats {name: (sum, weight)} and the scored rollout.

    Raises:
      InputError: the scores are not one per row, PPO has neither values nor critic, or
        the recipe is of responses of one turn and there are rewards of several.
    """
    critic = None
    if values is None:
        critic = critic_of(state, recipe=recipe, frozen=frozen)
    # Minibatches are packed otherwise than the whole batch; here all rows are read
    # once.
    of_batch = None if packing is None else packing.batch
    rows = rollout.tokens.shape[0]
    if scores is None:
        scores = jnp.zeros(rows, jnp.float32)
    returned = scores_of(scores, rows=rows)
    recipe.refuse_turns(returned.turns)
    row_mask = None
    if returned.left_out is not None:
        row_mask = ~jnp.asarray(returned.left_out)
        # Selected, not multiplied by 0: a score that is missing may be NaN, and NaN
        # times 0 is NaN.
        total = jnp.where(row_mask, returned.total, 0.0)
        returned = dataclasses.replace(returned, total=total)
        # From here on it has no token: whatever counts tokens leaves it out by itself.
        rollout = flow.rollout.leave_out(rollout, rows=~row_mask)
    # Before shaping, as the running moments that normalise a batch count it too.
    # Left-out rows are not in them, nor are those that the policy did not sample.
    moments = flow.shaping.next_moments(
        state.scores,
        recipe.reported(returned.total),
        row_mask=None if row_mask is None else recipe.reported(row_mask),
    )
    # Lengths and stops that shaping charges for are those of the response that was
    # scored.
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
    # With LoRA the adapters stand beside the frozen kernels: nothing is merged or
    # copied.
    params = adapted_params(state.policy, base=frozen.base, lora=recipe.lora)
    replay = recipe.routing_replay
    if replay is not None:
        rollout = routing_replay.recorded(
            rollout, params, recipe=recipe, replay=replay, packing=of_batch
        )
    reading: dict[str, Any] = {
        "model": recipe.model,
        "max_new_tokens": recipe.max_new_tokens,
        "temperature": recipe.temperature,
        "packing": of_batch,
    }
    # Before the KL, which is of `old_logprobs`: of the trainer's numbers where these
    # are recomputed, else of the sampler's.
    if recipe.recomputes_logprobs:
        rollout = flow.rollout.recompute_logprobs(rollout, params, **reading)
    scoring = {**reading, "penalty": recipe.penalty, "policy": params}
    scored = flow.score.score(
        rollout,
        replays_reference=replay is not None and replay.reference,
        scores=shaped,
        reference=frozen.reference,
        critic=None if critic is None else critic.params,
        critic_model=None if critic is None else critic.model,
        ref_logprobs=None if ref_output is None else ref_output.logprobs,
        values=values,
        value_after_stop=critic is not None and critic.after_stop,
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
    # Read before the update, which moves the controller: one β for the whole iteration.
    kl_coef = recipe.kl_coef(state)
    experience, experience_stats = recipe.experience(scored, kl_coef=kl_coef)
    if ref_output is not None and ref_output.taught is not None:
        # Divisors count what is taught alone, as they count no rejected response.
        taught = ref_output.taught[:, None] & experience.response_mask
        experience = dataclasses.replace(experience, response_mask=taught)
        share = masked.sum_stats(
            {"response/taught": ref_output.taught.astype(jnp.float32)},
            mask=jnp.ones(ref_output.taught.shape, bool),
        )
        experience_stats = experience_stats | share
    choice_stats, control_stats, weight_stats = {}, {}, {}
    # Before importance weights: the covariances of Clip-Cov are of advantages.
    if recipe.token_choice is not None:
        experience, choice_stats = token_choice.choose(
            experience, rollout=rollout, step=state.step, choice=recipe.token_choice
        )
    if recipe.entropy_control is not None:
        state, experience, control_stats = entropy_control.control(
            state,
            experience,
            rollout=recipe.reported(rollout),
            target=recipe.entropy_control,
        )
    ref_hidden = None
    # [B, S, D] in every minibatch is costly: only distillation keeps it.
    if ref_output is not None and recipe.reads_ref_hidden:
        ref_hidden = ref_output.hidden
    # Indices through `reported` say which rows the policy itself drew (Nash-MD: half).
    rows = recipe.reported(jnp.arange(rollout.tokens.shape[0]))
    sampled = flow.ledger.entries(rollout, step=state.step, rows=rows)
    experience = dataclasses.replace(
        experience,
        further=further,
        ref_hidden=ref_hidden,
        # Online DPO lays two responses in a row, so that the ledger's entries follow.
        sampled=jax.tree.map(experience.laid_out, sampled),
        experts=rollout.experts,
        top_k=rollout.top_k,
    )
    # Else `old_logprobs` are the sampler's, and the ratio of the loss is the weight.
    if recipe.recomputes_logprobs:
        experience, weight_stats = corrections.corrected(
            experience, rollout=rollout, step=state.step, recipe=recipe
        )
    ended = flow.score.ended(rewarded, stop_ids=recipe.stop_ids)
    stats = masked.merge_stats(
        weight_stats,
        flow.objective.objective_stats(
            # The metric is the reward's own score; what shaping made of it was for the
            # loss.
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
