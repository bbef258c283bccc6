"""Scores responses by a reward, a verifier in other processes, or a reward model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints.frozen_models import RewardModel
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices import processes
from rlhf_jax.roles.rewards.text import TextReward
from rlhf_jax.train.evaluate.options import Config
from rlhf_jax.train.evaluate.programs import Programs
from rlhf_jax.train.rewards import RewardPools
from rlhf_jax.train.rows import ReadRows

HostArray = np.ndarray[Any, Any]


class Scored(NamedTuple):
    """Scores of responses."""

    scores: HostArray  # f32[count], reward units
    failed: HostArray  # bool[count], the verifier gave no score
    counts: Mapping[str, HostArray] = {}  # f32[count], by name of the count


# (responses, number of them to score, from the first) -> their scores.
Score = Callable[[Rollout, int], Scored]


def scorer(
    options: Config,
    *,
    programs: Programs,
    start: Pretrained,
    read: ReadRows,
    pools: RewardPools,
    reward_model: RewardModel | None,
) -> Score | None:
    """Returns the scorer of the options; None without one."""
    if reward_model is not None:
        return lambda rollout, count: _all(
            processes.whole(programs.score(reward_model, rollout))[:count]
        )
    if options.verifier is not None:
        pool = pools.pools["verifier"]
        verified = pool.reward(
            decode=start.decode, rows=read.rows, prompts=read.written_prompts
        )

        def verify(rollout: Rollout) -> Scored:
            scores = verified(rollout)
            failed = np.asarray(scores.parts["failed"], bool)
            counts = {name: np.asarray(scores.parts[name]) for name in pool.counts}
            return Scored(np.asarray(scores.total), failed, counts)

        return lambda rollout, count: _by_first(verify, first(rollout, count))
    if options.reward is None:
        return None
    reward = TextReward(
        function=pools.functions["reward"],
        decode=start.decode,
        rows=read.rows,
        called=f"--reward {options.reward}",
        prompts=read.written_prompts,
    )
    return lambda rollout, count: _by_first(
        lambda rollout: _all(reward(rollout)), first(rollout, count)
    )


def _by_first(score: Callable[[Rollout], Scored], rollout: Rollout) -> Scored:
    """Computes scores in the first process, for all processes."""
    computed = processes.computed_by_first(lambda: _plain(score(rollout)))
    return Scored(
        np.asarray(computed["scores"], np.float32),
        np.asarray(computed["failed"], bool),
        {k: np.asarray(of, np.float32) for k, of in computed["counts"].items()},
    )


def _plain(scored: Scored) -> dict[str, Any]:
    return {
        "scores": np.asarray(scored.scores).tolist(),
        "failed": scored.failed.tolist(),
        "counts": {name: of.tolist() for name, of in scored.counts.items()},
    }


def _all(scores: HostArray) -> Scored:
    return Scored(scores, np.zeros(len(scores), bool))


def first(rollout: Rollout, count: int) -> Rollout:
    """Returns the first `count` responses, on the host."""
    return jax.tree.map(lambda leaf: leaf[:count], processes.whole(rollout))
