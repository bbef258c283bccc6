"""What the runs of one seed share: keys, prompts, a reference and a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import quickstart
from pipeline import preferences, reward_model
from pipeline.options import PROMPT_COLUMNS
from worlds import reviews

from rlhf_jax import decoder, ppo, rewards
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.data import batches
from rlhf_jax.data.batches import Batches
from rlhf_jax.runs import run

Array = jax.Array
Params = Any
Row = dict[str, Any]


class Prepared(NamedTuple):
    """What the runs of one seed share."""

    reference: Params
    reward_models: tuple[Params, ...]  # members of an ensemble, or one
    accuracy: float  # against the judge's own order, mean over the reward models


def prepare(
    options: quickstart.Config,
    *,
    algorithm: ppo.PPO,
    generate: Callable[..., Rollout],
    num_members: int = 1,
) -> Prepared:
    """Stages 1 and 2 of the quickstart, in a run folder of their own.

    Args:
      num_members: reward models that learn from the same pairs, each from a head and in
        an order of its own.
    """
    model = algorithm.model
    init_key, pair_key, head_key = keys_of(options.seed)[:3]
    stages = [reward_model.stage_of(member) for member in range(num_members)]
    num_steps = {"sft": options.sft_steps} | dict.fromkeys(stages, options.reward_steps)
    with run.Run(options, num_steps=num_steps) as job:
        tuned = quickstart.fine_tune(
            decoder.init(init_key, model=model), job=job, model=model, options=options
        )
        pairs, held_out = preferences.label_pairs(
            tuned,
            generate,
            judge=reviews.careful_gold,
            key=pair_key,
            options=options,
        )
        job.interrupt.check()  # no step of a stage may come to notice
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
                options=options,
                member=member,
            )
            for member in range(num_members)
        ]
    measured = [
        reward_model.measure_reward_model(scorer, held_out, model=model)
        for scorer in scorers
    ]
    scorers, accuracies = zip(*measured, strict=True)
    return Prepared(tuned, scorers, float(np.mean(accuracies)))


def judgement(answered: Rollout, *, batch_size: int) -> Row:
    """What judge and grammar say of some responses, and one of them.

    "distinct" is a mean over batches, as of more responses fewer are.
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
        "distinct": float(np.mean([len(set(said)) / len(said) for said in of_batches])),
        "prompt": answers[0][0],
        "response": responses[0],
    }


def keys_of(seed: int) -> list[Array]:
    """Of the model, the pairs, the score's head, PPO and the test: quickstart's own."""
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
    policy: Params, *, algorithm: ppo.PPO, prompts: Prompts, key: Array
) -> Rollout:
    return rollout.rollout(
        policy,
        model=algorithm.model,
        prompts=prompts,
        key=key,
        max_new_tokens=algorithm.max_new_tokens,
        stop_ids=algorithm.stop_ids,
        temperature=algorithm.temperature,
    )
