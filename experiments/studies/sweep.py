"""PPO iterations of many runs in one program: scanned over steps, mapped over runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pipeline.options import HELD_OUT_PROMPTS

from rlhf_jax import critic, kl_control, masked, ppo, rewards, state
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference.frozen import Frozen
from studies.policies.preparation import answers_of, judgement, keys_of, prompts_of

Array = jax.Array
Params = Any
Row = dict[str, Any]
Mapped = Literal["map", "vmap"]
# Also a line of metrics.jsonl for each β, beside that of all runs together.
OF_BETA = ("objective/scores", "objective/kl", "response/distinct_fraction")


class Ensemble(NamedTuple):
    """How the reward models of a seed are one reward."""

    how: rewards.Combine = "mean"
    std_coef: float = 1.0  # c of mean_minus_std


MEAN = Ensemble()


def reward_of(
    members: Params, *, reward_models: Frozen, model: ModelConfig, ensemble: Ensemble
) -> rewards.Reward:
    """The reward of a seed: its reward model, or several as one.

    Args:
      members: [M, ...], parameters of the reward models.
      reward_models: of all seeds; no forward pass reads their digests.
      model: shape of each.
      ensemble: read where M > 1.
    """
    scorers = [
        rewards.from_model(
            dataclasses.replace(reward_models, stored=pick(members, m)), model=model
        )
        for m in range(jax.tree.leaves(members)[0].shape[0])
    ]
    if len(scorers) == 1:
        return scorers[0]
    return rewards.ensemble(scorers, how=ensemble.how, std_coef=ensemble.std_coef)


def start(
    references: Sequence[Params], *, algorithm: ppo.PPO, kl_coefs: Sequence[float]
) -> TrainState:
    """TrainState[seeds, β, ...]: of each seed its reference, of each β its controller.

    Raises:
      InputError: a β is negative, NaN or infinite.
    """
    return stack(
        [
            stack(
                [
                    state.ppo_state(
                        policy=params,
                        critic=critic.from_policy(params, model=algorithm.critic_model),
                        policy_optimizer=algorithm.policy_optimizer,
                        critic_optimizer=algorithm.critic_optimizer,
                        kl=kl_control.fixed(kl_coef),
                    )
                    for kl_coef in kl_coefs
                ]
            )
            for params in references
        ]
    )


def iterations(
    train: TrainState,
    *,
    prompts: Prompts,
    references: Frozen,
    reward_models: Frozen,
    keys: Array,
    steps: Array,
    algorithm: ppo.PPO,
    mapped: Mapped,
    ensemble: Ensemble = MEAN,
) -> tuple[TrainState, masked.Stats, Rollout]:
    """K iterations of every run: a scan over steps, mapped over β and over seeds.

        train                        [seeds, β, ...]     a run each
        references                   [seeds, ...]        the runs of a seed share these:
        reward_models                [seeds, M, ...]     they differ in β alone, and
        prompts                      [seeds, K, B, P]    begin with the same tokens
        keys                         [seeds]

    Args:
      train: donated by the caller's `jit`.
      prompts, references, reward_models, keys: as above.
      steps: i32[K], numbers of the iterations.
      algorithm, mapped, ensemble: static.

    Returns:
      The next states; stats {name: (sum, weight)} and rollouts [seeds, β, K, ...].
    """
    over = jax.lax.map if mapped == "map" else lambda f, xs: jax.vmap(f)(xs)

    def of_seed(
        arguments: tuple[TrainState, Prompts, Params, Params, Array],
    ) -> tuple[TrainState, tuple[masked.Stats, Rollout]]:
        trains, prompts, reference, members, key = arguments
        # Digests are of the seeds together; no forward pass reads them.
        frozen_reference = dataclasses.replace(references, stored=reference)
        reward = reward_of(
            members,
            reward_models=reward_models,
            model=algorithm.model,
            ensemble=ensemble,
        )

        def iteration(
            train: TrainState, now: tuple[Array, Prompts]
        ) -> tuple[TrainState, tuple[masked.Stats, Rollout]]:
            step, prompts = now
            train, stats, scored = ppo.iteration(
                train,
                prompts=prompts,
                reference=frozen_reference,
                reward=reward,
                key=jax.random.fold_in(key, step),
                recipe=algorithm,
            )
            return train, (stats, scored.rollout)

        def of_run(
            train: TrainState,
        ) -> tuple[TrainState, tuple[masked.Stats, Rollout]]:
            return jax.lax.scan(iteration, train, (steps, prompts))

        return over(of_run, trains)

    train, (stats, rollouts) = over(
        of_seed, (train, prompts, references.stored, reward_models.stored, keys)
    )
    return train, stats, rollouts


def in_total(k: int, stats: masked.Stats, *, kl_coefs: Sequence[float]) -> masked.Stats:
    """The stats of a chunk's k-th step over all runs, and some for each β.

    Args:
      stats: of `iterations`, on the host.
    """
    row: masked.Stats = {}
    for name, (total, weight) in stats.items():
        if weight is None:
            row[name] = (total[..., k].max(), None)
            continue
        row[name] = (total[..., k].sum(), weight[..., k].sum())
        if name in OF_BETA:
            for b, kl_coef in enumerate(kl_coefs):
                pair = (total[:, b, k].sum(), weight[:, b, k].sum())
                row[f"kl_coef_{kl_coef:g}/{name}"] = pair
    return row


def stack(trees: Sequence[Any]) -> Any:
    """Trees of one structure as one, along a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def pick(tree: Any, *place: int) -> Any:
    """The tree at a place along the first axes."""
    return jax.tree.map(lambda leaf: leaf[place], tree)


def evaluate(
    policies: Params,
    references: Frozen,
    reward_models: Frozen,
    *,
    algorithm: ppo.PPO,
    seeds: Sequence[int],
    kl_coefs: Sequence[float],
    num_responses: int,
    batch_size: int,
    ensemble: Ensemble = MEAN,
) -> tuple[list[Row], list[Row]]:
    """Responses of every reference, and of every policy, to held-out prompts.

    Args:
      policies: [seeds, β, ...].
      reward_models: [seeds, M, ...].
      num_responses: of each policy.
      batch_size: responses among which "distinct" counts.

    Returns:
      A row for each seed, and a row for each run.
    """

    @jax.jit
    def answer(
        policy: Params, reference: Params, members: Params, prompts: Prompts, key: Array
    ) -> tuple[Rollout, Array, Array]:
        answered = answers_of(policy, algorithm=algorithm, prompts=prompts, key=key)
        reward = reward_of(
            members,
            reward_models=reward_models,
            model=algorithm.model,
            ensemble=ensemble,
        )
        scored = score.score(
            answered,
            scores=rewards.scores_of(reward(answered)).total,
            reference=dataclasses.replace(references, stored=reference),
            model=algorithm.model,
            critic=None,
            critic_model=None,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
        )
        assert scored.kl is not None
        kl = masked.masked_sum(scored.kl, mask=answered.response_mask)
        return answered, scored.scores.mean(), kl / num_responses

    before, after = [], []
    for s, seed in enumerate(seeds):
        prompts = prompts_of(HELD_OUT_PROMPTS, batch_size=num_responses, seed=seed)[0]
        reference, members = pick((references.stored, reward_models.stored), s)
        of_seed = [(before, None, reference)] + [
            (after, kl_coef, pick(policies, s, b)) for b, kl_coef in enumerate(kl_coefs)
        ]
        for rows, kl_coef, policy in of_seed:
            key = keys_of(seed)[4]
            answered, mean, kl = answer(policy, reference, members, prompts, key)
            rows.append(
                {
                    "seed": seed,
                    "kl_coef": kl_coef,
                    "score": float(mean),
                    "kl": float(kl),
                    **judgement(answered, batch_size=batch_size),
                }
            )
    return before, after
