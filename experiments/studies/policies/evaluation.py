"""Evaluates policies and best-of-n on held-out prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import quickstart
from pipeline.options import HELD_OUT_PROMPTS

from rlhf_jax import masked, rewards
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import score, selection
from rlhf_jax.functional import best_of_n
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards import Reward
from studies.policies import algorithms, preparation
from studies.policies.options import Config
from studies.policies.preparation import SeedModels

Array = jax.Array
Params = Any
Row = dict[str, Any]


@functools.cache
def programs_of(options: Config) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The programs that measure a policy's responses and draw those of best-of-n.

    Args:
      options: `Config.of_measuring` of a run; equal options share their programs.
    """
    algorithm = quickstart.algorithm_of(options)

    @jax.jit
    def measure(
        policy: Params, reference: Frozen, reward: Reward, prompts: Prompts, key: Array
    ) -> tuple[Rollout, Array, Array, Array]:
        answered, scores = algorithms.sampled(
            policy,
            reward=reward,
            prompts=prompts,
            key=key,
            algorithm=algorithm,
            group_size=1,
        )
        scored = score.score(
            answered,
            scores=scores,
            reference=reference,
            model=algorithm.model,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
        )
        assert scored.kl is not None
        kl = masked.masked_sum(scored.kl, mask=answered.response_mask)
        unshaped = rewards.scores_of(reward(answered)).total
        return answered, scores.mean(), unshaped.mean(), kl / scores.size

    draw = functools.partial(
        algorithms.sampled, algorithm=algorithm, group_size=2 * max(options.best_of)
    )
    return measure, jax.jit(draw)


def look(
    policy: Params,
    models: SeedModels,
    *,
    num_answers: int,
    options: Config,
    responses_per_prompt: int = 1,
) -> Row:
    """Measures a policy on held-out prompts.

    Args:
      policy: the parameters that respond.
      num_answers: total number of responses.
      responses_per_prompt: number of responses to each prompt.

    Returns:
      "score" with the shaping of training, "unshaped_score" of the reward model alone,
      "kl" by k1 in nats per response, and `preparation.judgement`.
    """
    measure, _ = programs_of(options.of_measuring())
    prompts = preparation.prompts_of(
        HELD_OUT_PROMPTS,
        batch_size=num_answers,
        seed=models.seed,
        samples_per_prompt=responses_per_prompt,
    )[0]
    answered, mean, unshaped, kl = measure(
        policy, models.reference, models.reward, prompts, models.test_key
    )
    judged = judgement(
        answered,
        num_prompts=num_answers // responses_per_prompt,
        batch_size=options.batch_size,
    )
    return {
        "score": float(mean),
        "unshaped_score": float(unshaped),
        "kl": float(kl),
        **judged,
    }


def best_of(models: SeedModels, *, options: Config) -> list[Row]:
    """Measures best-of-n for every n, with two sets of max(n) samples per prompt.

    The best response is chosen from each set; the other set estimates the choice's KL.
    """
    _, draw = programs_of(options.of_measuring())
    most = max(options.best_of)
    num_prompts = options.num_evaluated // options.responses_per_prompt
    prompts = preparation.prompts_of(
        HELD_OUT_PROMPTS,
        batch_size=2 * most,
        seed=models.seed,
        samples_per_prompt=2 * most,
    )
    drawn = [
        draw(
            models.reference.stored,
            reward=models.reward,
            prompts=prompts[number],
            key=models.test_key,
        )
        for number in range(num_prompts)
    ]
    answered, scores = jax.tree.map(lambda *parts: jnp.concatenate(parts), *drawn)
    others = scores.reshape(-1, 2, most)[:, ::-1].reshape(-1, most)
    rows = []
    for n in sorted({*options.best_of}):
        chosen, best = selection.best_of_n(answered, scores=scores, group_size=n)
        stats = selection.kl_stats(best.reshape(len(others), -1), among=others, n=n)
        rows.append(
            {
                "n": n,
                "kl_bound": best_of_n.kl_bound(n),
                "kl": float(masked.mean_stats(stats)["best_of_n/kl"]),
                "score": float(best.mean()),
                **judgement(
                    chosen, num_prompts=num_prompts, batch_size=options.batch_size
                ),
            }
        )
    return rows


def judgement(answered: Rollout, *, num_prompts: int, batch_size: int) -> Row:
    """`preparation.judgement` of responses that are sorted by prompt."""
    # Responses to one prompt go to different batches, which so have the most prompts.
    rows = len(answered.tokens)
    order = np.arange(rows).reshape(num_prompts, -1).T.reshape(-1)
    return preparation.judgement(
        jax.tree.map(lambda leaf: leaf[order], jax.device_get(answered)),
        batch_size=batch_size,
    )
