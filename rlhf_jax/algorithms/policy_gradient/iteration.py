"""An iteration of any policy gradient, up to where algorithms differ.

    sample ─> reward ─> price ─> (experience) ─> (update)
                        └ scores shaped, policy, reference and critic run

What stands in brackets is the algorithm's: GAE and a value loss in `ppo`, groups of
samples in `grpo`. The functions here take the options that the two share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Prompts, Rollout, Scored
from rlhf_jax.algorithms.flow import objective, score, shaping
from rlhf_jax.algorithms.flow import rollout as rollout_
from rlhf_jax.algorithms.policy_gradient.loss import mean_distance
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.update import kl_coef as kl_coef_
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles import adapted, rewards
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.model import Scores

Array = jax.Array
Params = Any
# rollout -> f32[B] or Scores; a pytree (`rewards.from_model`) if it holds parameters.
Reward = Callable[[Rollout], Array | Scores]


def sample(
    policy: Params,
    *,
    prompts: Prompts,
    key: Array,
    algorithm: PolicyGradient,
    base: Frozen | None = None,
    group_size: int = 1,
) -> Rollout:
    """The rollout of an iteration, under the first of the two keys split from `key`.

    Args, Raises: as `ppo.iteration`, with the policy's parameters or adapters;
    group_size as `rollout.rollout`.
    """
    algorithm.minibatch_size(prompts.tokens.shape[0])  # before any work is done in vain
    sample_key, _ = jax.random.split(key)
    rollout = rollout_.rollout(
        adapted.params(policy, base=base, lora=algorithm.lora),
        model=algorithm.model,
        prompts=prompts,
        key=sample_key,
        max_new_tokens=algorithm.max_new_tokens,
        stop_ids=() if algorithm.fixed_length else algorithm.stop_ids,
        temperature=algorithm.temperature,
        group_size=group_size,
        slots=algorithm.slots,
    )
    if not algorithm.fixed_length or algorithm.truncate_reward_only:
        return rollout
    return rollout_.truncate(
        rollout, stop_ids=algorithm.stop_ids, after=algorithm.truncate_after
    )


def judged(rollout: Rollout, *, algorithm: PolicyGradient) -> Rollout:
    """What a reward is to see of the rollout of `sample`: mostly the same.

    With `algorithm.truncate_reward_only` the responses end at their first stop token
    here, while the policy is trained on all they have.
    """
    if not algorithm.truncate_reward_only:
        return rollout
    return rollout_.truncate(
        rollout, stop_ids=algorithm.stop_ids, after=algorithm.truncate_after
    )


class Critic(NamedTuple):
    """What values a rollout."""

    params: Params  # {"trunk": ..., "score": ...}, as in `critic.py`
    model: ModelConfig
    after_stop: bool  # the finished response has a value


class Priced(NamedTuple):
    """A scored rollout, and what is left of an iteration to write down."""

    scored: Scored
    state: TrainState  # with the moments of these scores in
    kl_coef: Array  # β of this iteration, f32[], reward units per nat
    # To be laid over the update's: with `reprice` `policy/sampler_mismatch` is here,
    # as the update compares the trainer with itself.
    stats: masked.Stats


def price(
    state: TrainState,
    *,
    rollout: Rollout,
    scores: Array | Scores,
    reference: Frozen | None,
    algorithm: PolicyGradient,
    critic: Critic | None,
    ref_logprobs: Array | None = None,
    values: Array | None = None,
    base: Frozen | None = None,
) -> Priced:
    """What reward, reference and critic say of a rollout, before anything is learned.

    Args, Raises: as `ppo.learn`; critic is None where there is none.
    """
    given = rewards.scores_of(scores)
    scores, rows = given.total, rollout.tokens.shape[0]
    if scores.shape != (rows,):
        raise InputError(
            f"expected the reward to return {rows} numbers, one a response, got shape "
            f"{scores.shape}"
        )
    params = adapted.params(state.policy, base=base, lora=algorithm.lora)
    # A batch with a score that is not finite does not count: a NaN would stay.
    moments = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(scores).all(), new, old),
        rewards.update_moments(state.scores, scores),
        state.scores,
    )
    seen = judged(rollout, algorithm=algorithm)
    shaped = shaping.shape(
        scores,
        moments=moments,
        rollout=seen,
        stop_ids=algorithm.stop_ids,
        shaping=algorithm.scores,
    )
    priced, mismatch = rollout, {}
    if algorithm.reprice:
        priced = rollout_.reprice(
            rollout,
            params,
            model=algorithm.model,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
        )
        mismatch["policy/sampler_mismatch"] = mean_distance(
            priced.old_logprobs, rollout.old_logprobs, mask=rollout.response_mask
        )
    scored = score.score(
        priced,
        scores=shaped,
        reference=reference,
        model=algorithm.model,
        critic=None if critic is None else critic.params,
        critic_model=None if critic is None else critic.model,
        max_new_tokens=algorithm.max_new_tokens,
        temperature=algorithm.temperature,
        penalty=algorithm.penalty,
        policy=params,
        ref_logprobs=ref_logprobs,
        values=values,
        value_after_stop=critic is not None and critic.after_stop,
    )
    kl_coef = kl_coef_(state, algorithm=algorithm)
    stats = objective.objective_stats(
        dataclasses.replace(scored, scores=scores),  # as the reward gave them
        kl_coef=kl_coef,
        ended=score.ended(seen, stop_ids=algorithm.stop_ids),
    )
    stats |= rewards.part_stats(given) | mismatch
    state = dataclasses.replace(state, scores=moments)
    return Priced(scored, state, kl_coef, stats)
