"""The loop over iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.policy_gradient.sampler_mismatch import staleness
from rlhf_jax.data import batches
from rlhf_jax.devices import row_sharding
from rlhf_jax.inspection import sampled_tokens
from rlhf_jax.roles.rewards import transcripts
from rlhf_jax.runs import run
from rlhf_jax.train.grpo import redraws
from rlhf_jax.train.grpo.options import VerifiedConfig
from rlhf_jax.train.grpo.programs import Programs
from rlhf_jax.train.grpo.tasks import Task
from rlhf_jax.train.outside.sampler import OutsideSampler
from rlhf_jax.train.rollouts.queue import RolloutQueue
from rlhf_jax.train.sampling.sampler import versions

Params = Any
SAMPLE_EVERY = 10  # iterations between rows of samples.jsonl
SHOWN = 4  # responses in samples.jsonl each time


def improve(
    stage: run.Stage,
    programs: Programs,
    *,
    prompts: batches.Batches[Prompts],
    task: Task,
    decode: Callable[[list[int]], str],
    ahead: RolloutQueue | None,
    options: VerifiedConfig,
) -> Params:
    """Trains on the score less β · KL to the reference; returns the policy."""
    train, reference = stage.state["train"], stage.state["reference"]
    reward, draw = task.reward, task.draw(programs)
    outside = programs.sample if isinstance(programs.sample, OutsideSampler) else None
    if ahead is not None:
        stage.state |= ahead.begin(
            stage.state, start=stage.start, policy=train.policy, version=train.step
        )
    for step in stage.steps():
        key = jax.random.fold_in(stage.state["root_key"], step)
        scores, draw_stats = None, {}
        if ahead is not None:
            with stage.user_code():
                rollout, scores = ahead.take()
            stage.state |= ahead.submit(
                step + options.staleness, train.policy, version=train.step
            )
            draw_stats = staleness(rollout, step=jnp.int32(step))
        else:
            with stage.user_code():  # of an environment, or a sampler outside
                rollout, scores = draw(
                    train.policy, prompts=prompts[step], key=key, version=train.step
                )
            draw_stats = {} if outside is None else outside.stats()
        with stage.user_code():
            if options.redraws:
                assert reward is not None  # as the options have it
                rollout, scores, redrawn = redraws.fill(
                    rollout,
                    policy=train.policy,
                    version=train.step,
                    programs=programs,
                    prompts=prompts,
                    reward=reward,
                    options=options,
                    group_size=programs.group_size,
                    step=step,
                    root_key=stage.state["root_key"],
                )
                draw_stats = draw_stats | redrawn
            scored = programs.score(
                rollout, reference=reference, reward=reward, key=key, scores=scores
            )
        train, stats, _ = programs.learn(train, rollout=rollout, key=key, **scored)
        stage.state["train"] = train
        samples = []
        if step % SAMPLE_EVERY == 0:
            local = row_sharding.local_rows(
                (rollout, scored["scores"].total, scored["ref_logprobs"])
            )
            shown, totals, ref_logprobs = jax.tree.map(
                lambda leaf: leaf[:SHOWN], programs.reported(local)
            )
            samples = [
                {
                    "question": question,
                    "answer": answer,
                    "score": float(total),
                    "version": version,
                    **tokens,
                }
                for (question, answer), total, version, tokens in zip(
                    transcripts.texts(shown, decode=decode, asked=task.asked),
                    totals,
                    versions(shown),
                    sampled_tokens.columns(
                        shown,
                        logprobs=shown.old_logprobs,
                        ref_logprobs=ref_logprobs,
                        decode=decode,
                    ),
                    strict=True,
                )
            ]
        stage.end_step(
            step,
            stats | draw_stats,
            samples,
            texts=[(rollout.mask, rollout.response_mask)],
            waits=waits_of(ahead, outside),
        )
    return train.policy


def waits_of(
    ahead: RolloutQueue | None, outside: OutsideSampler | None
) -> dict[str, float] | None:
    """Seconds of this step for timings.jsonl; None where nobody waits."""
    if ahead is None and outside is None:
        return None
    waits = {} if ahead is None else ahead.waits.read()
    return waits | ({} if outside is None else outside.seconds())
