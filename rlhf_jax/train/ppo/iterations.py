"""The rehearsal, and the loop over iterations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import ppo
from rlhf_jax.algorithms.batch import Prompts, Rollout, Sequences
from rlhf_jax.algorithms.policy_gradient.sampler_mismatch import staleness
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.text import Written
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference import drift, lifecycle
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.runs import run
from rlhf_jax.train import rehearsal
from rlhf_jax.train.environment.opened import require_some
from rlhf_jax.train.judge import Judge
from rlhf_jax.train.ppo.models import Models, rounding_of
from rlhf_jax.train.ppo.options import Config
from rlhf_jax.train.ppo.programs import Programs
from rlhf_jax.train.ppo.samples import sample_rows
from rlhf_jax.train.rollouts.queue import Draw, RolloutQueue

Array = jax.Array
Params = Any


def rehearse(
    models: Models,
    programs: Programs,
    *,
    prompts: Prompts,
    ptx: Batches[Sequences] | None,
    reward: ppo.Reward | None,
    episodes: Draw | None,
    judge: Judge | None,
    key: Array,
    options: Config,
) -> None:
    """The first iteration up to its update, before there is a run folder.

    A reward function that fails stops the run now, and so does whatever does not fit.

    Args:
      reward: of rollouts that are drawn without scores.
      episodes: draws rollouts with scores; None draws responses.
    """
    train, reference = models.train, models.reference
    draw = programs.draw if episodes is None else episodes
    rollout, drawn = draw(train.policy, prompts=prompts, key=key, version=train.step)
    if options.environment is not None:
        assert isinstance(drawn, Scores)  # as episodes have them
        require_some(drawn, environment=options.environment)

    def score(rollout: Rollout) -> dict[str, Any]:
        shown = ppo.seen_by_reward(rollout, recipe=models.algorithm)
        scores = scores_of(shown, drawn=drawn, reward=reward)
        if judge is not None:
            judge(shown)
        ref_logprobs, values, further = None, None, {}
        packing = programs.pack(rollout, key=key)
        if reference is not None:
            ref_logprobs = programs.reference_logprobs(reference, rollout, packing)
            further = programs.further(rollout, packing)
        if precedes_reward(models):
            values = programs.values(train, models.critic, rollout, packing)
        return {
            "scores": scores,
            "ref_logprobs": ref_logprobs,
            "values": values,
            "packing": packing,
            "further": further,
        }

    rehearsal.rehearse(
        rollout,
        score=score,
        learn=functools.partial(
            programs.learn,
            train,
            models.critic,
            reference=reference,
            key=key,
            ptx=None if ptx is None else ptx[0],
        ),
        measure=functools.partial(programs.measure, train.policy, base=models.base),
        dtype=options.dtype,
        sampler_tolerance=options.sampler_tolerance,
        storage_tolerance=rounding_of(models, options),
        expect_equal=options.reference is None,
    )


def scores_of(
    shown: Rollout,
    *,
    drawn: Scores | Callable[[], Scores] | None,
    reward: ppo.Reward | None,
) -> Array | Scores:
    """The scores that came with a rollout, or those of the reward.

    Args:
      shown: what the reward sees of the rollout.
      drawn: scores that it was drawn with, or what waits for them.
      reward: for a rollout without.
    """
    if drawn is not None:
        return drawn() if callable(drawn) else drawn
    assert reward is not None  # of responses
    return reward(shown)


def precedes_reward(models: Models) -> bool:
    """The critic runs before the reward, and not in one program with the update."""
    return not models.rewards or models.critic is not None


def improve(
    models: Models,
    programs: Programs,
    *,
    reward: ppo.Reward | None,
    episodes: Draw | None,
    judge: Judge | None,
    texts: dict[str, Sequences],
    prompts: Batches[Prompts],
    ptx: Batches[Sequences] | None,
    key: Array,
    job: run.Run,
    meta: dict[str, str],
    policy: Pretrained,
    asked: Sequence[Written],
    options: Config,
) -> tuple[Params, Frozen | None]:
    """PPO, score - kl_coef · KL to the reference; policy and reference at the end.

    Args:
      reward: of rollouts that are drawn without scores.
      episodes: draws rollouts with scores; None draws responses.
      asked: the prompts as they were written, by row of the data set.
    """
    draw = programs.draw if episodes is None else episodes
    base, reference = models.base, models.reference
    kept: dict[str, Any] = {"train": models.train, "root_key": key}
    if models.critic is not None:
        kept["critic"] = models.critic
    beside = models.frozen_rewards
    beside |= {f"references/{name}": each for name, each in models.further.items()}
    if base is not None:
        beside["base"] = base
    if models.critic_devices is not None and models.critic_devices.base is not None:
        beside["critic_base"] = models.critic_devices.base
    if reference is not None and reference is not base:
        kept["reference"] = reference
    ahead = None
    if options.staleness:
        ahead = RolloutQueue(
            programs.draw_ahead if episodes is None else episodes,
            hand_over=programs.sample.hand_over,
            prompts=prompts.__getitem__,
            key=key,
            staleness=options.staleness,
            num_steps=options.num_steps,
            threaded=programs.sample.threaded,
            patience=options.stop_timeout,
        )
        kept |= ahead.first(models.train.policy, version=models.train.step)
    moving = ("reference",) if options.lifecycle.moves else ()
    with (
        job.stage("ppo", kept, meta=meta, beside=beside, moving=moving) as stage,
        contextlib.nullcontext() if ahead is None else ahead,
    ):
        train, critic = stage.state["train"], stage.state.get("critic")
        reference = stage.state.get("reference", base)
        if models.reference is None:
            reference = None
        if ahead is not None:
            stage.state |= ahead.begin(
                stage.state, start=stage.start, policy=train.policy, version=train.step
            )
        for step in stage.steps():
            step_key, old = jax.random.fold_in(key, step), {}
            if ahead is not None:
                with stage.user_code():
                    rollout, drawn = ahead.take()
                stage.state |= ahead.submit(
                    step + options.staleness, train.policy, version=train.step
                )
                old = staleness(rollout, step=jnp.int32(step))
            else:
                with stage.user_code():  # of an environment
                    rollout, drawn = draw(
                        train.policy,
                        prompts=prompts[step],
                        key=step_key,
                        version=train.step,
                    )
            shown = ppo.seen_by_reward(rollout, recipe=models.algorithm)
            ref_logprobs, values, further = None, None, {}
            packing = programs.pack(rollout, key=step_key)
            if reference is not None and options.lifecycle.takes_kl(step):
                ref_logprobs = programs.reference_logprobs(reference, rollout, packing)
                further = programs.further(rollout, packing)
            if precedes_reward(models):  # beside what comes next
                values = programs.values(train, critic, rollout, packing)
            watched = {}
            with stage.user_code():
                scores = scores_of(shown, drawn=drawn, reward=reward)
                if step % options.eval_every == 0:
                    watched = watch(programs, train.policy, texts, base, judge, shown)
            shows, likely = step % options.sample_every == 0, None
            if shows:  # of the policy that responded, which the update takes
                likely = programs.likeliest(
                    train.policy, reference, shown, rows=options.num_shown
                )
            train, critic, stats, scored = programs.learn(
                train,
                critic,
                rollout=rollout,
                scores=scores,
                reference=None if ref_logprobs is None else reference,
                ref_logprobs=ref_logprobs,
                values=values,
                key=step_key,
                ptx=None if ptx is None else ptx[step],
                packing=packing,
                further=further,
            )
            stage.state["train"] = train
            if critic is not None:
                stage.state["critic"] = critic
            stats |= old | watched
            measured = step % options.drift_every == 0
            if measured and reference is not None and reference.model is None:
                stats |= drift.stats(programs.drift(train.policy, reference))
            samples, positions = [], None
            if shows:
                beside = None
                if options.sample_reference:
                    assert reference is not None  # as the options ask for it
                    beside = programs.sample(
                        reference.stored,
                        prompts=prompts[step],
                        key=step_key,
                        version=train.step,  # of nothing; it is the same program
                    )
                    beside = ppo.seen_by_reward(beside, recipe=models.algorithm)
                samples = sample_rows(
                    shown,
                    scores,
                    ref_logprobs=ref_logprobs,
                    policy=policy,
                    asked=asked,
                    count=options.num_shown,
                    beside=beside,
                    likely=likely,
                )
                positions = None if ref_logprobs is None else programs.positions(scored)
            if reference is not None and options.lifecycle.moves:
                reference = lifecycle.after_step(
                    reference, train.policy, step=step, lifecycle=options.lifecycle
                )
                stage.state["reference"] = reference
            stage.end_step(
                step,
                stats,
                samples,
                positions=positions,
                texts=[(rollout.mask, rollout.response_mask)],
                waits=None if ahead is None else ahead.waits.read(),
            )
    return train.policy, reference


def watch(
    programs: Programs,
    policy: Params,
    texts: dict[str, Sequences],
    base: Frozen | None,
    judge: Judge | None,
    rollout: Rollout,
) -> Stats:
    """Statistics of what is not trained on: fixed texts, and the judge's scores."""
    stats = programs.evaluate(policy, texts, base)
    if judge is not None:
        stats |= judge(rollout)
    return stats
