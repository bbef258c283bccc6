"""Trains one policy on the language of the quickstart, by one algorithm.

    python experiments studies.policies.reviews --algorithm grpo --out runs/grpo

    prepared/ (reference, reward model) ──> algorithm ──> responses to held-out prompts

The sweeps of `kl_frontier`, `compare_algorithms` and `kl_in_practice` run this program.
Reference and reward model are trained as in the quickstart, but the judge is careful
(`reviews.careful_gold`): it labels and scores responses that do not parse as
unreadable, whatever their words. The reference and the reward model of a seed are
trained once for all runs (--prepared).

samples.jsonl has the evaluations of the policy along training, as rows without a
prompt, and a few of its responses. summary.json has "reference" and "policy" (or "best
of 2" and so on), measured on held-out prompts: gold, fluency (share that parses),
distinct (share of the responses of a batch), score, KL in nats per response.

A run of PPO takes about a minute on two CPU cores, and the models of a seed half a
minute. Expect for seed 0 with --kl-coef 0.2 a gold score of 0.8 to 0.9 at 2 to 3 nats.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
from pipeline import shown
from pipeline.preferences import text_of
from pipeline.samples import careful_gold

from rlhf_jax import masked
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.algorithms.policy_gradient.corrections import staleness
from rlhf_jax.roles.reference import storage
from rlhf_jax.runs import command_line, folder, report, run
from rlhf_jax.train.rollouts.queue import RolloutQueue
from studies.policies import preparation
from studies.policies.algorithms import Trainer, trainer_of
from studies.policies.evaluation import best_of, look
from studies.policies.options import Config
from studies.policies.preparation import SeedModels

Params = Any
Row = dict[str, Any]
SHOWN = 2  # responses that samples.jsonl gets at a time
MEASURED = ("gold", "score", "fluency", "distinct")


def train(
    trainer: Trainer, models: SeedModels, *, job: run.Run, options: Config
) -> Params:
    """Trains the policy and writes its evaluations to samples.jsonl."""
    start = {
        "train": trainer.start(models.reference.stored, options.kl_coef),
        "reference": models.reference,
        "root_key": models.train_key,
    }
    ahead = None
    if trainer.draw is not None:
        asked = trainer.batches(models)

        def request(step: int, version: jax.Array) -> Request:
            version = jnp.array(version, copy=True)  # the update donates it
            key = jax.random.fold_in(models.train_key, step)
            return Request(asked[step], key, version)

        # Without a thread: the study is about the effect of older samples, not speed.
        ahead = RolloutQueue(
            trainer.draw,
            hand_over=storage.store,
            request=request,
            staleness=options.staleness,
            num_steps=trainer.num_steps,
            threaded=False,
        )
        start |= ahead.first(models.reference.stored, version=start["train"].step)
    every = options.sample_every * trainer.num_steps // options.num_steps
    beside = {
        "reward model" if m == 0 else f"reward model {m}": model
        for m, model in enumerate(models.reward_models)
    }
    regulariser = options.regulariser
    with job.stage(
        options.algorithm, start, meta={}, beside=beside, moving=regulariser.moving
    ) as stage:
        left = stage.steps()
        batches = trainer.batches(models) if left else []
        if ahead is not None:
            train = stage.state["train"]
            stage.state |= ahead.begin(
                stage.state,
                start=stage.start,
                policy=trainer.policy(train),
                version=train.step,
            )
        for step in left:
            rows = []
            if step % every == 0 and options.look == "held_out":
                policy = trainer.policy(stage.state["train"])
                count = options.batch_size
                rows = [look(policy, models, num_answers=count, options=options)]
            if ahead is None:
                batch, old = batches[step], {}
            else:
                train = stage.state["train"]
                batch, _ = ahead.take()
                old = staleness(batch, step=jnp.int32(step))
                stage.state |= ahead.submit(
                    step + options.staleness,
                    trainer.policy(train),
                    version=train.step,
                )
            stage.state["train"], stats, scored = trainer.update(
                stage.state["train"],
                batch=batch,
                reference=stage.state["reference"],
                reward=models.reward,
                key=jax.random.fold_in(stage.state["root_key"], step),
            )
            stage.state["reference"] = regulariser.moved(
                stage.state["reference"], trainer.policy(stage.state["train"])
            )
            stats |= old
            if step % every == 0 and scored is not None:
                judged = preparation.judgement(
                    scored.rollout, batch_size=options.batch_size
                )
                stats |= {"judge/score": (jnp.float32(judged["gold"]), jnp.float32(1))}
                if options.look == "training":
                    means = masked.mean_stats(stats)
                    score, kl = means["objective/scores"], means["objective/kl"]
                    rows = [{"score": float(score), "kl": float(kl), **judged}]
                rows += shown.rows_of(
                    scored, count=SHOWN, decode=text_of, judge=careful_gold
                )
            stage.end_step(step, stats, rows)
    return trainer.policy(stage.state["train"])


def main(options: Config) -> None:
    started = time.perf_counter()
    trainer = trainer_of(options.of_programs())
    num_steps = {} if trainer is None else {options.algorithm: trainer.num_steps}
    measured: dict[str, Row] = {}
    summary: Row = {"algorithm": options.algorithm, "kl_coef": options.kl_coef}
    with run.Run(options, num_steps=num_steps) as job:
        models = preparation.seed_models(options, check=job.interrupt.check)
        job.interrupt.check()  # there may be no step left that checks
        at_end = functools.partial(
            look,
            models=models,
            num_answers=options.num_evaluated,
            responses_per_prompt=options.responses_per_prompt,
            options=options,
        )
        measured["reference"] = at_end(models.reference.stored)
        if trainer is not None:
            policy = train(trainer, models, job=job, options=options)
            measured["policy"] = at_end(policy)
        else:
            rows = best_of(models, options=options)
            measured |= {f"best of {row['n']}": row for row in rows}
    models.verify()
    report.table(
        "Responses to held-out prompts",
        ("", "KL [nats]", "gold", "score", "fluent", "distinct"),
        [
            (name, *(row[key] for key in ("kl", *MEASURED)))
            for name, row in measured.items()
        ],
    )
    summary |= measured
    summary |= {
        "responses_for_training": options.num_steps * options.batch_size,
        "reward_model_accuracy": models.accuracy,
        "reference_verified": True,
        "seconds": job.seconds_before + time.perf_counter() - started,
    }
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; figures and samples in {job.folder}")


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
