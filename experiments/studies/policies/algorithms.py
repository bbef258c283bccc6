"""The algorithms that train a policy, behind one interface.

    trainer.start(reference) ─> state ─update(batches[step])─> state ─> policy

A trainer connects an algorithm to the language of the quickstart. PPO, GRPO and RLOO
have the same samples, epochs, minibatches and policy learning rate. DPO has as many
responses, from the reference, and takes as many updates on them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import quickstart
from pipeline import optimizers, preferences
from pipeline.options import TRAIN_PROMPTS
from worlds import reviews

from rlhf_jax import critic, dpo, grpo, masked, ppo, rewards, state
from rlhf_jax.algorithms.batch import (
    PackedPreferences,
    Prompts,
    Request,
    Rollout,
    Scored,
)
from rlhf_jax.algorithms.flow import shaping
from rlhf_jax.algorithms.grpo.experience import Baseline
from rlhf_jax.algorithms.policy_gradient import iteration as policy_gradient
from rlhf_jax.algorithms.policy_gradient.corrections import (
    Ratio,
    Recompute,
    SamplerCorrection,
    Truncate,
)
from rlhf_jax.algorithms.state import SupervisedState, TrainState
from rlhf_jax.data import packing
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.examples import Pair
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels
from rlhf_jax.roles.rewards import Reward
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.rollouts.queue import Draw
from studies.policies import preparation
from studies.policies.options import Config
from studies.policies.preparation import SeedModels

Array = jax.Array
Params = Any


class Trainer(NamedTuple):
    """The interface of an algorithm to the training loop."""

    num_steps: int
    # (reference, kl_coef) -> the state before the first step
    start: Callable[[Params, float], Any]
    batches: Callable[[SeedModels], Batches[Any]]
    # (state, batch=, reference=, reward=, key=) -> (state, stats, the policy's scored
    # responses or None); donates the state.
    update: Callable[..., tuple[Any, masked.Stats, Scored | None]]
    policy: Callable[[Any], Params]  # of a state
    # The draw of a `RolloutQueue`, whose rollout is then the batch of `update`. None:
    # `update` draws with the policy of the step.
    draw: Draw | None = None


@functools.cache
def trainer_of(options: Config) -> Trainer | None:
    """The trainer of an algorithm, whose programs are compiled once.

    Args:
      options: `Config.of_programs` of a run; equal options share a trainer.

    Returns:
      None for best-of-n.
    """
    algorithm = dataclasses.replace(
        quickstart.algorithm_of(options),
        penalty=options.penalty,
        aggregation=options.aggregation,
        whiten_advantages=options.whiten_advantages,
        lam=options.lam,
        sampler_correction=_correction(options),
    )
    match options.algorithm:
        case "ppo":
            return _by_ppo(algorithm, options=options)
        case "grpo":
            return _by_groups("group", algorithm, options=options)
        case "rloo":
            return _by_groups("leave_one_out", algorithm, options=options)
        case "dpo":
            return _by_dpo(algorithm, options=options)
        case "best_of_n":
            return None


def _by_ppo(algorithm: ppo.PPO, *, options: Config) -> Trainer:
    """PPO with a critic and one response per prompt."""

    def start(reference: Params, kl_coef: float) -> TrainState:
        return state.ppo_state(
            policy=storage.store(reference),
            critic=critic.from_policy(reference, model=algorithm.critic_model),
            policy_optimizer=algorithm.policy_optimizer,
            critic_optimizer=algorithm.critic_optimizer,
            kl=options.kl_control.controller(kl_coef, num_steps=options.num_steps),
        )

    iteration = functools.partial(ppo.iteration, recipe=algorithm)
    return _online(start, iteration, algorithm, samples_per_prompt=1, options=options)


def _by_groups(baseline: Baseline, algorithm: ppo.PPO, *, options: Config) -> Trainer:
    """GRPO or RLOO; the other options are those of the PPO.

    Advantages are not divided by the std of a group, which would scale β differently in
    every group.
    """
    groups = grpo.GRPO(
        baseline=baseline,
        normalise=None,
        group_size=options.group_size,
        penalty=algorithm.penalty,
        aggregation=algorithm.aggregation,
        temperature=algorithm.temperature,
        scores=algorithm.scores,
        num_epochs=algorithm.num_epochs,
        num_minibatches=algorithm.num_minibatches,
        model=algorithm.model,
        policy_optimizer=algorithm.policy_optimizer,
        sampler_correction=algorithm.sampler_correction,
        max_new_tokens=algorithm.max_new_tokens,
        stop_ids=algorithm.stop_ids,
        **options.regulariser.of_recipe,
    )
    # The group mean includes the response itself, which scales its reward by (G - 1)/G.
    # Scaling β in the loss alike gives the optimum of the other algorithms.
    share = 1.0
    if baseline == "group" and algorithm.penalty.placement == "loss":
        share = 1 - 1 / options.group_size

    def start(reference: Params, kl_coef: float) -> TrainState:
        return state.grpo_state(
            policy=storage.store(reference),
            policy_optimizer=groups.policy_optimizer,
            kl=options.kl_control.controller(
                share * kl_coef, num_steps=options.num_steps
            ),
        )

    iteration = functools.partial(grpo.iteration, recipe=groups)
    return _online(
        start,
        iteration,
        groups,
        samples_per_prompt=options.group_size,
        options=options,
    )


def _online(
    start: Callable[[Params, float], TrainState],
    iteration: Callable[..., tuple[TrainState, masked.Stats, Scored]],
    recipe: ppo.PPO | grpo.GRPO,
    *,
    samples_per_prompt: int,
    options: Config,
) -> Trainer:
    def update(
        train: TrainState,
        *,
        batch: Prompts,
        reference: Frozen,
        reward: Reward,
        key: Array,
    ) -> tuple[TrainState, masked.Stats, Scored]:
        return iteration(
            train,
            prompts=batch,
            frozen=FrozenModels(reference=reference),
            reward=reward,
            key=key,
        )

    def learn(
        train: TrainState,
        *,
        batch: Rollout,
        reference: Frozen,
        reward: Reward,
        key: Array,
    ) -> tuple[TrainState, masked.Stats, Scored]:
        rewarded = policy_gradient.seen_by_reward(batch, recipe=recipe)
        return policy_gradient.learn(
            train,
            rollout=batch,
            scores=reward(rewarded),
            frozen=FrozenModels(reference=reference),
            key=key,
            recipe=recipe,
        )

    sample = jax.jit(functools.partial(policy_gradient.sample, recipe=recipe))

    def draw(
        policy: Params, request: Request
    ) -> tuple[Rollout, Callable[[], dict[str, Scores]]]:
        prompts, key, version = request.prompts, request.key, request.version
        return sample(policy, prompts=prompts, key=key, version=version), dict

    ahead = options.staleness > 0
    return Trainer(
        num_steps=options.num_steps,
        start=start,
        batches=lambda models: _prompts(
            models, samples_per_prompt=samples_per_prompt, options=options
        ),
        update=jax.jit(learn if ahead else update, donate_argnames=("train",)),
        policy=lambda train: train.policy,
        draw=draw if ahead else None,
    )


def _correction(options: Config) -> SamplerCorrection:
    """The correction for an older sampler."""
    if not options.staleness or options.correction == "ratio":
        return Ratio()
    return Truncate() if options.correction == "truncate" else Recompute()


def _by_dpo(algorithm: ppo.PPO, *, options: Config) -> Trainer:
    """DPO on pairs of the reference's responses, labelled by the reward model."""
    updates = options.num_steps * options.num_epochs * options.num_minibatches
    pairwise = dpo.DPO(
        model=algorithm.model,
        optimizer=optimizers.adam(options.dpo_learning_rate, updates),
        beta=options.kl_coef,
        temperature=algorithm.temperature,
    )
    draw = jax.jit(functools.partial(sampled, algorithm=algorithm, group_size=2))

    def start(reference: Params, kl_coef: float) -> SupervisedState:
        assert kl_coef == pairwise.beta
        return state.supervised_state(
            storage.store(reference), optimizer=pairwise.optimizer
        )

    def update(
        train: SupervisedState,
        *,
        batch: PackedPreferences,
        reference: Frozen,
        reward: Reward,
        key: Array,
    ) -> tuple[SupervisedState, masked.Stats, None]:
        del reward, key  # both were used to sample and label the pairs
        return *dpo.update(train, batch=batch, dpo=pairwise, reference=reference), None

    return Trainer(
        num_steps=updates,
        start=start,
        batches=lambda models: packing.packed_batches(
            packing.pack(pairs_of(models, draw=draw, options=options), width=None),
            batch_size=options.batch_size // options.num_minibatches // 2,
            seed=models.seed,
            pad_id=reviews.PAD_ID,
        ),
        update=jax.jit(update, donate_argnames=("train",)),
        policy=lambda train: train.params,
    )


def pairs_of(
    models: SeedModels,
    *,
    draw: Callable[..., tuple[Rollout, Array]],
    options: Config,
) -> list[Pair]:
    """Pairs of the reference's responses, P(a is chosen) = σ(score(a) - score(b))."""
    prompts = _prompts(models, samples_per_prompt=2, options=options)
    # A separate stream: the seed's own stream labelled the reward model's pairs.
    rng, pairs = np.random.default_rng((models.seed, 1)), []
    for step in range(options.num_steps):
        answered, scores = draw(
            models.reference.stored,
            reward=models.reward,
            prompts=prompts[step],
            key=models.train_key,
        )
        answers, scores = preferences.answers_in(answered), np.asarray(scores)
        labels = reviews.noisy_preferences(rng, scores[::2], scores[1::2], noise=1.0)
        for k, first_is_chosen in enumerate(labels):
            (prompt, better), (_, worse) = answers[2 * k : 2 * k + 2]
            if not first_is_chosen:
                better, worse = worse, better
            if better != worse:
                prompt, better, worse = map(preferences.ids_of, (prompt, better, worse))
                pairs.append(Pair(prompt, better, worse))
    return pairs


def sampled(
    policy: Params,
    *,
    reward: Reward,
    prompts: Prompts,
    key: Array,
    algorithm: ppo.PPO,
    group_size: int,
) -> tuple[Rollout, Array]:
    """Samples responses and returns them with the shaped scores of training, f32[B]."""
    answered = preparation.answers_of(
        policy, algorithm=algorithm, prompts=prompts, key=key, group_size=group_size
    )
    shaped = shaping.shape(
        rewards.scores_of(reward(answered)).total,
        moments=rewards.no_moments(),
        rollout=answered,
        stop_ids=algorithm.stop_ids,
        shaping=algorithm.scores,
    )
    return answered, shaped


def _prompts(
    models: SeedModels, *, samples_per_prompt: int, options: Config
) -> Batches[Prompts]:
    return preparation.prompts_of(
        TRAIN_PROMPTS,
        batch_size=options.batch_size,
        seed=models.seed,
        samples_per_prompt=samples_per_prompt,
    )
