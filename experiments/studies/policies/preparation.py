"""Keys, prompts, reference and reward models that the runs of one seed share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import quickstart
from pipeline import preferences, reward_model
from pipeline.options import PROMPT_COLUMNS
from worlds import reviews

from rlhf_jax import decoder, frozen, ppo, rewards
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.data import batches
from rlhf_jax.data.batches import Batches
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import Reward
from rlhf_jax.runs import run
from studies.policies import made_once
from studies.policies.options import Config

Array = jax.Array
Params = Any
Row = dict[str, Any]


class SeedModels(NamedTuple):
    """The models that the runs of one seed share."""

    seed: int
    reference: Frozen
    reward_models: tuple[Frozen, ...]  # members of an ensemble, or one
    reward: Reward  # the combined reward of the reward models
    accuracy: float  # on the judge's noise-free order, mean over the reward models

    @property
    def train_key(self) -> Array:
        return keys_of(self.seed)[3]

    @property
    def test_key(self) -> Array:
        return keys_of(self.seed)[4]

    def verify(self) -> None:
        """Checks that no frozen model has changed.

        Raises:
          ReferenceMovedError: a model has changed; the error names the leaf.
        """
        for model in (self.reference, *self.reward_models):
            frozen.verify(model)


def seed_models(options: Config, *, check: Callable[[], None]) -> SeedModels:
    """The frozen models of a seed, trained by the first run that needs them.

    The name of their folder has the seed and a digest of the options on which they
    depend, so that runs with other differences share it.

    Args:
      check: see `made_once.made_once`.
    """
    place = options.out / "prepared" if options.prepared is None else options.prepared
    own = options.of_preparation(place)
    folder = made_once.folder_of(place, "reviews", own, options.num_members)
    make = functools.partial(_prepare, options, folder)
    made = made_once.made_once(folder, make, check=check)
    model = quickstart.algorithm_of(own).model
    members = tuple(
        frozen.freeze(made[f"reward_model_{member}"])
        for member in range(options.num_members)
    )
    scorers = [rewards.from_model(member, model=model) for member in members]
    reward = scorers[0]
    if len(scorers) > 1:
        lowered = options.combine == "mean_minus_std"
        reward = rewards.ensemble(
            scorers,
            how=options.combine,
            std_coef=options.std_coef if lowered else None,
        )
    return SeedModels(
        options.seed,
        frozen.freeze(made["reference"]),
        members,
        reward,
        float(made["accuracy"].mean()),
    )


def _prepare(options: Config, folder: Path) -> made_once.Arrays:
    """Runs stages 1 and 2 of the quickstart with the careful judge.

    Several reward models learn from the same pairs, each with its own initial head and
    its own order of the pairs.
    """
    own = options.of_preparation(folder / "run")
    algorithm = quickstart.algorithm_of(own)
    model = algorithm.model
    generate = jax.jit(functools.partial(answers_of, algorithm=algorithm))
    init_key, pair_key, head_key = keys_of(own.seed)[:3]
    members = range(options.num_members)
    stages = [reward_model.stage_of(member) for member in members]
    num_steps = {"sft": own.sft_steps} | dict.fromkeys(stages, own.reward_steps)
    with run.Run(own, num_steps=num_steps) as job:
        tuned = quickstart.fine_tune(
            decoder.init(init_key, model=model), job=job, model=model, options=own
        )
        pairs, held_out = preferences.label_pairs(
            tuned, generate, judge=reviews.careful_gold, key=pair_key, options=own
        )
        job.interrupt.check()  # there may be no step left that checks
        scorers = [
            reward_model.train_reward_model(
                rewards.init(
                    jax.random.fold_in(head_key, member) if member else head_key,
                    tuned,
                    model=model,
                ),
                pairs,
                job=job,
                model=model,
                options=own,
                member=member,
            )
            for member in members
        ]
    measured = [
        reward_model.measure_reward_model(scorer, held_out, model=model)
        for scorer in scorers
    ]
    return {
        "reference": tuned,
        "accuracy": np.array([accuracy for _, accuracy in measured]),
        **{f"reward_model_{m}": params for m, (params, _) in enumerate(measured)},
    }


def judgement(answered: Rollout, *, batch_size: int) -> Row:
    """The mean gold score, fluency and distinct share of some responses.

    "distinct" is a mean over batches, because the share falls with the number of
    responses.
    """
    answers = preferences.answers_in(answered)
    split = [(prompt.split(), response.split()) for prompt, response in answers]
    responses = [response for _, response in answers]
    of_batches = [
        responses[at : at + batch_size] for at in range(0, len(answers), batch_size)
    ]
    return {
        "gold": float(np.mean([reviews.careful_gold(*pair) for pair in split])),
        "fluency": float(np.mean([reviews.parses(*pair) for pair in split])),
        "distinct": float(
            np.mean([len(set(responses)) / len(responses) for responses in of_batches])
        ),
    }


def keys_of(seed: int) -> list[Array]:
    """The keys of model, pairs, score head, PPO and test, as in the quickstart."""
    return [jax.random.fold_in(jax.random.key(seed), number) for number in range(5)]


def prompts_of(
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    seed: int,
    samples_per_prompt: int = 1,
) -> Batches[Prompts]:
    return batches.prompt_batches(
        prompts,
        batch_size=batch_size,
        samples_per_prompt=samples_per_prompt,
        seed=seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS,),
    )


def answers_of(
    policy: Params,
    *,
    algorithm: ppo.PPO,
    prompts: Prompts,
    key: Array,
    group_size: int = 1,
) -> Rollout:
    return rollout.rollout(
        policy,
        model=algorithm.model,
        prompts=prompts,
        key=key,
        max_new_tokens=algorithm.max_new_tokens,
        stop_ids=algorithm.stop_ids,
        temperature=algorithm.temperature,
        group_size=group_size,
    )
