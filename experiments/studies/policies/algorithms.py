"""The algorithms that `compare_algorithms.py` compares, each as its loop sees it.

    trainer.start(reference) ─> state ─update(batches[step])─> state ─> policy

A trainer is the wiring of an algorithm to the language of the quickstart. What samples,
epochs, minibatches and policy learning rate are to PPO they are to GRPO and RLOO; DPO
has as many responses from the reference, and takes as many updates on them.
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

from rlhf_jax import critic, dpo, grpo, kl_control, masked, ppo, rewards, state
from rlhf_jax.algorithms.batch import PackedPreferences, Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout, shaping
from rlhf_jax.algorithms.grpo import GroupRecipe
from rlhf_jax.algorithms.state import SupervisedState, TrainState
from rlhf_jax.data import packing
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.encoding import Pair
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import Reward
from studies.policies import preparation

Array = jax.Array
Params = Any
# Without the std, by which β would mean another thing in every group; k2 per token in
# the loss. (Per response it has all of the KL's gradient, but is too noisy for 16
# updates on a batch: the KL goes beyond 100 nats within 40 iterations.)
GRPO = GroupRecipe(baseline="group", normalise=None)


class SeedModels(NamedTuple):
    """What the runs of one seed share."""

    seed: int
    reference: Frozen
    reward_model: Frozen
    reward: Reward  # of the reward model
    accuracy: float  # of the reward model, against the judge's own order

    @property
    def train_key(self) -> Array:
        return preparation.keys_of(self.seed)[3]

    @property
    def test_key(self) -> Array:
        return preparation.keys_of(self.seed)[4]


class Trainer(NamedTuple):
    """An algorithm as the loop sees it."""

    num_steps: int
    start: Callable[[Params], Any]  # reference -> the state before the first step
    batches: Callable[[SeedModels], Batches[Any]]
    # (state, batch=, reference=, reward=, key=) -> (state, stats); donates the state.
    update: Callable[..., tuple[Any, masked.Stats]]
    policy: Callable[[Any], Params]  # of a state


def by_ppo(algorithm: ppo.PPO, *, options: quickstart.Config) -> Trainer:
    """PPO with a critic, a response to each prompt."""

    def start(reference: Params) -> TrainState:
        return state.ppo_state(
            policy=storage.store(reference),
            critic=critic.from_policy(reference, model=algorithm.critic_model),
            policy_optimizer=algorithm.policy_optimizer,
            critic_optimizer=algorithm.critic_optimizer,
            kl=kl_control.fixed(options.kl_coef),
        )

    iteration = functools.partial(ppo.iteration, recipe=algorithm)
    return _online(start, iteration, samples_per_prompt=1, options=options)


def by_groups(
    recipe: GroupRecipe,
    algorithm: ppo.PPO,
    *,
    group_size: int,
    options: quickstart.Config,
) -> Trainer:
    """GRPO or RLOO, whose other options are those of the PPO."""
    fitted = dataclasses.replace(
        recipe,
        group_size=group_size,
        temperature=algorithm.temperature,
        scores=algorithm.scores,
        num_epochs=algorithm.num_epochs,
        num_minibatches=algorithm.num_minibatches,
    )
    groups = grpo.GRPO(
        **vars(fitted),
        model=algorithm.model,
        policy_optimizer=algorithm.policy_optimizer,
        max_new_tokens=algorithm.max_new_tokens,
        stop_ids=algorithm.stop_ids,
    )

    # The mean of its group holds the response itself, and so (G - 1)/G of its reward
    # counts: with as much of β the optimum is that of the others.
    share = 1 - 1 / group_size if groups.baseline == "group" else 1.0

    def start(reference: Params) -> TrainState:
        return state.grpo_state(
            policy=storage.store(reference),
            policy_optimizer=groups.policy_optimizer,
            kl=kl_control.fixed(share * options.kl_coef),
        )

    iteration = functools.partial(grpo.iteration, recipe=groups)
    return _online(start, iteration, samples_per_prompt=group_size, options=options)


def _online(
    start: Callable[[Params], TrainState],
    iteration: Callable[..., tuple[TrainState, masked.Stats, Any]],
    *,
    samples_per_prompt: int,
    options: quickstart.Config,
) -> Trainer:
    def update(
        train: TrainState,
        *,
        batch: Prompts,
        reference: Frozen,
        reward: Reward,
        key: Array,
    ) -> tuple[TrainState, masked.Stats]:
        train, stats, _ = iteration(
            train, prompts=batch, reference=reference, reward=reward, key=key
        )
        return train, stats

    return Trainer(
        num_steps=options.num_steps,
        start=start,
        batches=lambda models: _prompts(
            models, samples_per_prompt=samples_per_prompt, options=options
        ),
        update=jax.jit(update, donate_argnames=("train",)),
        policy=lambda train: train.policy,
    )


def by_dpo(
    algorithm: ppo.PPO, *, learning_rate: float, options: quickstart.Config
) -> Trainer:
    """DPO on pairs of the reference's answers that the reward model labels."""
    updates = options.num_steps * options.num_epochs * options.num_minibatches
    pairwise = dpo.DPO(
        model=algorithm.model,
        optimizer=optimizers.adam(learning_rate, updates),
        beta=options.kl_coef,
        temperature=algorithm.temperature,
    )
    draw = jax.jit(functools.partial(sampled, algorithm=algorithm, group_size=2))

    def update(
        train: SupervisedState,
        *,
        batch: PackedPreferences,
        reference: Frozen,
        reward: Reward,
        key: Array,
    ) -> tuple[SupervisedState, masked.Stats]:
        del reward, key  # both have had their part in the pairs
        return dpo.update(train, batch=batch, dpo=pairwise, reference=reference)

    return Trainer(
        num_steps=updates,
        start=lambda reference: state.supervised_state(
            storage.store(reference), optimizer=pairwise.optimizer
        ),
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
    options: quickstart.Config,
) -> list[Pair]:
    """Pairs of the reference's answers, P(a is chosen) = σ(score(a) - score(b))."""
    prompts = _prompts(models, samples_per_prompt=2, options=options)
    # A stream of its own: that of the seed labelled the reward model's pairs.
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
    """Answers, and their scores f32[B] as all are trained, or chosen, by them."""
    answered = rollout.rollout(
        policy,
        model=algorithm.model,
        prompts=prompts,
        key=key,
        max_new_tokens=algorithm.max_new_tokens,
        stop_ids=algorithm.stop_ids,
        temperature=algorithm.temperature,
        group_size=group_size,
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
    models: SeedModels, *, samples_per_prompt: int, options: quickstart.Config
) -> Batches[Prompts]:
    return preparation.prompts_of(
        TRAIN_PROMPTS,
        batch_size=options.batch_size,
        seed=models.seed,
        samples_per_prompt=samples_per_prompt,
    )
