"""The β frontier: what the KL penalty buys, and three failures that come without it.

    python experiments studies.kl_frontier --out runs/frontier

PPO on the language of the quickstart under six β and from three seeds, as one program:
`ppo.iteration`, scanned over steps and mapped over seeds and β. The judge is a careful
one (`reviews.careful_gold`), for whom nonsense stays nonsense however it praises. The
labels that the reward models learn from are this judge's: nobody else is measured.

On two CPU cores it takes 24 minutes, the sweep 18 of them. Expect, over seeds 0 to 2 (±
deviation), that without the penalty the reward-model score rises to 2.9 ± 0.4 while
gold falls from -0.2 to -2.0, fluency from 0.94 to 0 and distinct responses to 0.55 ±
0.16, at 80 ± 32 nats of KL. β = 0.1 and above keep gold at 0.64 - 0.85, fluency at 0.85
- 0.95 and 0.99 or more of the responses distinct, as means of seeds; gold - β KL peaks
at β = 0.2. Recorded in `recorded/kl_frontier`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import quickstart
from pipeline.options import TRAIN_PROMPTS

from rlhf_jax import frozen, masked, ppo, rewards
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import checks
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import command_line, folder, metrics, report, run, run_config
from studies import overoptimisation
from studies.policies.preparation import (
    answers_of,
    judgement,
    keys_of,
    prepare,
    prompts_of,
)
from studies.sweep import (
    Ensemble,
    Mapped,
    evaluate,
    in_total,
    iterations,
    pick,
    stack,
    start,
)

Array = jax.Array
Params = Any
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    kl_coefs: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
    """The β to compare, reward units per nat."""
    num_seeds: int = 3
    """Runs of each β: --seed and those after it, each with models of its own."""
    num_steps: int = 40
    """PPO iterations of a run."""
    chunk_steps: int = 5
    """Iterations in one call of the program; Python sees the runs between calls."""
    mapped: Mapped | None = None
    """Runs one after the other or abreast; None is map on CPU and vmap elsewhere."""
    measure_every: int = 2
    """Steps between rows of samples.jsonl, in which judge and grammar are asked."""
    snapshot_every: int = 10
    """Steps between snapshots; a multiple of --chunk-steps."""
    sft_steps: int = 400
    """Updates of supervised fine-tuning."""
    reward_steps: int = 120
    """Updates of reward-model training."""
    num_pairs: int = 4096
    """Labelled pairs; an eighth of them is held out."""
    label_noise: float = 0.4
    """Of the judge, in gold units: the temperature of its Bradley-Terry choice."""
    temperature: float = 0.7
    """Divides the logits in every role."""
    hidden_size: int = 128
    """Width of all models."""
    num_layers: int = 2
    """Depth of all models."""
    num_heads: int = 4
    """Attention heads of all models."""
    batch_size: int = 128
    """Prompts an iteration."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Optimizer steps a pass."""
    num_evaluated: int = 512
    """Responses of each policy to held-out prompts at the end."""
    num_members: int = 1
    """Reward models of a seed; they differ in their heads and the order of pairs."""
    combine: rewards.Combine = "mean"
    """How several reward models make one reward."""
    std_coef: float = 1.0
    """c of --combine mean_minus_std, the charge for the members' disagreement."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shown = {f"{kl_coef:g}" for kl_coef in self.kl_coefs}  # their names in records
        if not shown or len(shown) < len(self.kl_coefs):
            raise checks.InputError(
                f"--kl-coefs: expected at least one β and each once, to six digits, "
                f"got {self.kl_coefs}; every β has a run of each seed already"
            )
        for kl_coef in self.kl_coefs:
            checks.non_negative(kl_coefs=kl_coef)
        if self.num_members == 1 and self.combine != "mean":
            raise checks.InputError(
                f"--combine {self.combine}: expected several reward models, got one; "
                f"add --num-members 3"
            )
        checks.non_negative(std_coef=self.std_coef)
        checks.positive(
            num_members=self.num_members,
            num_seeds=self.num_seeds,
            chunk_steps=self.chunk_steps,
            measure_every=self.measure_every,
        )
        for option, steps in (
            ("--num-steps", self.num_steps),
            ("--snapshot-every", self.snapshot_every),
        ):
            if steps % self.chunk_steps:
                raise checks.InputError(
                    f"{option}: expected a multiple of --chunk-steps "
                    f"{self.chunk_steps}, between which alone there is a state to "
                    f"save, got {steps}; change either"
                )

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.num_seeds)

    @property
    def ensemble(self) -> Ensemble:
        return Ensemble(self.combine, self.std_coef)

    def of_seed(self, seed: int) -> quickstart.Config:
        """The quickstart whose first two stages prepare the runs of a seed."""
        return quickstart.Config(
            out=self.out / f"seed_{seed}",
            seed=seed,
            resume=True,  # or begin
            progress=self.progress,
            num_steps=self.num_steps,
            sft_steps=self.sft_steps,
            reward_steps=self.reward_steps,
            num_pairs=self.num_pairs,
            label_noise=self.label_noise,
            temperature=self.temperature,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            batch_size=self.batch_size,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            num_evaluated=self.num_evaluated,
        )


# --- PPO: every run in one program ------------------------------------------------


def sweep(
    references: Frozen,
    reward_models: Frozen,
    *,
    job: run.Run,
    algorithm: ppo.PPO,
    options: Config,
) -> Params:
    """Stage 3 for every seed and β.

    Returns:
      The policies [seeds, β, ...]. What was measured of each run along the way stands
      in samples.jsonl, with one of its responses.
    """
    mapped = options.mapped
    if mapped is None:
        mapped = "map" if jax.default_backend() == "cpu" else "vmap"
    program = jax.jit(
        functools.partial(
            iterations, algorithm=algorithm, mapped=mapped, ensemble=options.ensemble
        ),
        donate_argnames=("train",),
    )
    prompts = [
        prompts_of(TRAIN_PROMPTS, batch_size=options.batch_size, seed=seed)
        for seed in options.seeds
    ]
    stage_state = {
        "train": start(
            [pick(references.stored, s) for s in range(options.num_seeds)],
            algorithm=algorithm,
            kl_coefs=options.kl_coefs,
        ),
        "reference": references,
        "root_keys": jnp.stack([keys_of(seed)[3] for seed in options.seeds]),
    }
    with job.stage(
        "sweep", stage_state, meta={}, beside={"reward model": reward_models}
    ) as stage:
        for first in stage.steps()[:: options.chunk_steps]:
            steps = range(first, first + options.chunk_steps)
            stage.state["train"], *outcome = program(
                stage.state["train"],
                prompts=stack([stack([of[step] for step in steps]) for of in prompts]),
                references=stage.state["reference"],
                reward_models=reward_models,
                keys=stage.state["root_keys"],
                steps=jnp.asarray(steps, jnp.int32),
            )
            stats, rollouts = jax.device_get(outcome)
            for k, step in enumerate(steps):
                rows = []
                if step % options.measure_every == 0:
                    rows = measured(k, stats, rollouts, options=options)
                row = in_total(k, stats, kl_coefs=options.kl_coefs)
                if step != steps[-1]:
                    job.record.write(step, row)
                    job.record.write_samples(step, rows)
                else:  # the one step whose state there is, to be saved
                    stage.end_step(step, row, rows)
    return stage.state["train"].policy


# --- what each run has come to ----------------------------------------------------


def measured(
    k: int, stats: masked.Stats, rollouts: Rollout, *, options: Config
) -> list[Row]:
    """A row a run, of the policy that sampled in a chunk's k-th step.

    Args:
      stats, rollouts: of `iterations`, on the host.
    """
    runs = itertools.product(enumerate(options.seeds), enumerate(options.kl_coefs))
    return [
        {
            "seed": seed,
            "kl_coef": kl_coef,
            "score": _mean_of(stats["objective/scores"], s, b, k),
            "kl": _mean_of(stats["objective/kl"], s, b, k),
            **judgement(pick(rollouts, s, b, k), batch_size=options.batch_size),
        }
        for (s, seed), (b, kl_coef) in runs
    ]


def _mean_of(pair: tuple[Any, Any], *place: int) -> float:
    return float(pair[0][place] / pair[1][place])


def main(options: Config) -> None:
    started = time.perf_counter()
    algorithm = quickstart.algorithm_of(options.of_seed(options.seed))
    generate = jax.jit(functools.partial(answers_of, algorithm=algorithm))
    with run.Run(options, num_steps={"sweep": options.num_steps}) as job:
        prepared = [
            prepare(
                options.of_seed(seed),
                algorithm=algorithm,
                generate=generate,
                num_members=options.num_members,
            )
            for seed in options.seeds
        ]
        references = frozen.freeze(stack([of.reference for of in prepared]))
        reward_models = frozen.freeze(
            stack([stack(of.reward_models) for of in prepared])
        )
        sweep_started = time.perf_counter()
        policies = sweep(
            references, reward_models, job=job, algorithm=algorithm, options=options
        )
        sweep_seconds = time.perf_counter() - sweep_started
    frozen.verify(references)
    before, after = evaluate(
        policies,
        references,
        reward_models,
        algorithm=algorithm,
        seeds=options.seeds,
        kl_coefs=options.kl_coefs,
        num_responses=options.num_evaluated,
        batch_size=options.batch_size,
        ensemble=options.ensemble,
    )
    points = metrics.read(options.out / "samples.jsonl")
    figures = overoptimisation.summarise(points, before, after)
    overoptimisation.tell(figures)
    report.side_by_side(
        [
            {
                "policy": "reference" if of is before[0] else f"β = {of['kl_coef']:g}",
                "response": of["response"],
            }
            for of in (before[0], *after[: len(options.kl_coefs)])
        ],
        title=before[0]["prompt"],
    )
    overoptimisation.plots(job.folder, [*points, *after], figures)
    summary = {
        **figures,
        "reward_model_accuracy": [of.accuracy for of in prepared],
        "responses": [*before, *after],
        "reference_verified": True,
        "sweep_seconds": sweep_seconds,
        "seconds": time.perf_counter() - started,
    }
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; figures, samples and plots in {job.folder}")


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
