"""Trains one policy to add from a verifier alone, without a reward model.

    python experiments studies.policies.arithmetic --out runs/arithmetic

    <3+4+5>  ->  12.            three digits, their sum, and a stop

The sweeps of `grpo_arithmetic` and `kl_in_practice` run this program. A small decoder
is fine-tuned on worked examples until it knows the form and gets some sums right. This
is the reference, trained once for all runs of a seed (--prepared). Then it responds
eight times to each prompt, a verifier compares the last integer of each response with
the sum, and GRPO makes right responses more likely than wrong ones, with a β·KL penalty
to the reference. A fifth of the 1000 triples is held out of both stages. PPO has a
critic and one response per prompt.

summary.json has "reference" and "policy": the share of held-out triples that is right,
greedy and sampled ("gold"), that of training triples ("train", greedy), and the KL in
nats per response. samples.jsonl has "gold" and the KL along training.

A run takes 5.5 minutes on one CPU core. Expect for seed 0, greedy: 0.29 of the held-out
triples with the reference and 0.995 with the policy, at a KL of 1.8 nats.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from pipeline import shown
from worlds.arithmetic import decode_text, every_triple, prompts_of, verifier

from rlhf_jax import frozen
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels
from rlhf_jax.runs import command_line, folder, report, run
from studies.policies.sums import scores
from studies.policies.sums.training import (
    Config,
    Programs,
    programs_of,
    reference_of,
)

Array = jax.Array
Params = Any
Row = dict[str, Any]
SHOWN = 2  # responses that samples.jsonl gets at a time


def improve(
    reference: Frozen,
    rows: Sequence[Row],
    *,
    held_out: Sequence[Row],
    programs: Programs,
    job: run.Run,
    options: Config,
) -> Params:
    """Trains the policy on verified responses, with a β·KL penalty to the reference.

    Args:
      rows: sums to train on.
      held_out: sums to evaluate along training.
    """
    prompts = prompts_of(
        rows,
        batch_size=options.batch_size,
        samples_per_prompt=options.group_size if options.algorithm == "grpo" else 1,
        seed=options.seed,
    )
    reward = verifier(rows)
    key, test_key = keys_of(options.seed)
    measure = functools.partial(scores.sampled, algorithm=programs.algorithm)
    start = programs.start(reference.stored, options.kl_coef)
    stage_state = {"train": start, "reference": reference, "root_key": key}
    regulariser = options.regulariser
    with job.stage(
        options.algorithm, stage_state, meta={}, moving=regulariser.moving
    ) as stage:
        train = stage.state["train"]
        for step in stage.steps():
            sample_rows = []
            if step % options.sample_every == 0:
                sample_rows = [measure(train.policy, reference, held_out, key=test_key)]
            step_key = jax.random.fold_in(key, step)
            answered = programs.sample(
                train.policy, prompts=prompts[step], key=step_key
            )
            train, stats, scored = programs.learn(
                train,
                rollout=answered,
                scores=jnp.asarray(reward(answered)),
                frozen=FrozenModels(reference=stage.state["reference"]),
                key=step_key,
            )
            stage.state["train"] = train
            stage.state["reference"] = regulariser.moved(
                stage.state["reference"], train.policy
            )
            if sample_rows:
                sample_rows += shown.rows_of(
                    scored, count=SHOWN, decode=decode_text, judge=right
                )
            stage.end_step(step, stats, sample_rows)
    return train.policy


def right(prompt: str, response: str) -> float:
    """1 if the response is the sum and the stop, else 0."""
    return float(response == f"{sum(int(d) for d in prompt if d.isdigit())}.")


def keys_of(seed: int) -> tuple[Array, Array]:
    """The keys of the iterations and of the evaluations."""
    root = jax.random.key(seed)
    return jax.random.fold_in(root, 1), jax.random.fold_in(root, 2)


def main(options: Config) -> None:
    started = time.perf_counter()
    programs = programs_of(options.of_programs())
    rows = every_triple(options.seed)
    held_out, learned = rows[: options.held_out], rows[options.held_out :]
    with run.Run(options, num_steps={options.algorithm: options.num_steps}) as job:
        reference = frozen.freeze(
            reference_of(options, learned, check=job.interrupt.check)
        )
        job.interrupt.check()  # there may be no step left that checks
        policy = improve(
            reference,
            learned,
            held_out=held_out,
            programs=programs,
            job=job,
            options=options,
        )
    frozen.verify(reference)
    _, key = keys_of(options.seed)
    own = {"algorithm": programs.algorithm, "key": key}
    figures = {
        name: scores.sampled(params, reference, held_out, **own)
        | {
            "greedy": scores.greedy(params, held_out, **own),
            "train": scores.greedy(params, learned, **own),
        }
        for name, params in (("reference", reference.stored), ("policy", policy))
    }
    lines = {
        "greedy": f"{len(held_out)} held-out triples, greedy",
        "gold": "sampled",
        "train": f"{len(learned)} training triples, greedy",
        "kl": "KL [nats per response]",
    }
    report.table(
        "Share of the responses that is right",
        ("", *figures),
        [
            (line, *(of[name] for of in figures.values()))
            for name, line in lines.items()
        ],
    )
    summary = {
        "algorithm": options.algorithm,
        "kl_coef": options.kl_coef,
        **figures,
        "reference_verified": True,
        "seconds": job.seconds_before + time.perf_counter() - started,
    }
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; figures and samples in {job.folder}")


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
