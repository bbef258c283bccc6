"""PPO, GRPO, RLOO, DPO and best-of-n on one language: gold score against KL.

    python experiments studies.compare_algorithms --out runs/compare

Reference and reward model are those of the quickstart, the judge is the careful one of
the β frontier (`reviews.careful_gold`). All maximise the same objective, the score of
this reward model less kl_coef · KL to the reference (GRPO by the gradient of a KL per
token in the loss, which leaves out what a token does to the states behind it), from as
many samples: a run of PPO, GRPO or RLOO draws num_steps · batch_size responses of its
policy; DPO as many of the reference, in pairs that the reward model labels
(Bradley-Terry of its scores, so that β = kl_coef has the optimum of the others), and
takes as many updates on them. Best-of-n draws none for training and n for every answer
at test time: it is what a policy has to beat at its KL.

Two CPU cores take 16 minutes. Expect of seeds 0 to 2: best-of-n's gold rises from -0.23
to 0.94 at n = 32 and 1.04 at 64, at the KL that theory says to a tenth of a nat; PPO
comes to 0.88 ± 0.03 at 2.4 nats, GRPO to 0.84 ± 0.01 at 2.7, RLOO to 0.83 ± 0.04 at
2.4, DPO to 0.48 ± 0.02 at 1.6. None beats best-of-n at its KL; PPO is 0.04 ± 0.05 off.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import quickstart

from rlhf_jax import frozen, grpo, kl_control, ppo, rewards
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import checks
from rlhf_jax.runs import command_line, folder, metrics, report, run
from studies import comparison
from studies.policies import algorithms as trainers
from studies.policies import preparation
from studies.policies.algorithms import SeedModels, Trainer
from studies.policies.evaluation import best_of, looker

Array = jax.Array
Params = Any
Row = dict[str, Any]
Algorithm = Literal["ppo", "grpo", "rloo", "dpo", "best_of_n"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(quickstart.Config):
    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    """Which to compare."""
    num_seeds: int = 3
    """Runs of each: --seed and those after it, each with models of its own."""
    group_size: int = 8
    """Responses to each prompt of GRPO and RLOO."""
    dpo_learning_rate: float = 1e-4
    """Falls to 0 linearly."""
    best_of: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    """The n of best-of-n; each divides the last."""
    num_prompts: int = 64
    """Held-out prompts, the same for all; twice the largest n samples answer each for
    best-of-n, and --num-evaluated of every policy share them."""
    snapshot_every: int = 20
    """Steps between snapshots."""
    sample_every: int = 5
    """Iterations between rows of samples.jsonl, for which judge and grammar read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.algorithms or len(set(self.algorithms)) < len(self.algorithms):
            raise checks.InputError(
                f"--algorithms: expected at least one and each once, got "
                f"{self.algorithms}; every one has a run of each seed already"
            )
        checks.positive(
            num_seeds=self.num_seeds,
            num_prompts=self.num_prompts,
            dpo_learning_rate=self.dpo_learning_rate,
        )
        rising = sorted(set(self.best_of))
        if not rising or rising[0] < 2 or any(rising[-1] % n for n in rising):
            raise checks.InputError(
                f"--best-of: expected numbers above 1 that divide the largest of them, "
                f"got {self.best_of}; choose powers of 2"
            )
        if self.num_evaluated % self.num_prompts:
            raise checks.InputError(
                f"--num-evaluated: expected a multiple of the {self.num_prompts} of "
                f"--num-prompts, each answered as often, got {self.num_evaluated}; "
                f"change either"
            )
        if self.kl_control != kl_control.CONSTANT:
            raise checks.InputError(
                f"--kl-control: expected none, as one --kl-coef makes the objective "
                f"that all maximise, got kind {self.kl_control.kind}; leave it out"
            )
        if {"grpo", "rloo"} & {*self.algorithms}:
            checks.groups(self.batch_size, group_size=self.group_size, least=2)
        if "dpo" in self.algorithms:
            checks.positive(kl_coef=self.kl_coef)  # which DPO divides by
            if self.batch_size % (2 * self.num_minibatches):
                raise checks.InputError(
                    f"--batch-size: expected pairs of responses in each of the "
                    f"{self.num_minibatches} minibatches of DPO, got {self.batch_size} "
                    f"responses; change either, or leave dpo out of --algorithms"
                )

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.num_seeds)

    def of_seed(self, seed: int) -> quickstart.Config:
        """The quickstart whose first two stages prepare the runs of a seed."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(quickstart.Config)
        }
        own |= {"out": self.out / f"seed_{seed}", "seed": seed}
        own |= {"resume": True}  # or begin
        return quickstart.Config(**own)


def prepare(
    seed: int,
    *,
    algorithm: ppo.PPO,
    generate: Callable[..., Rollout],
    options: Config,
) -> SeedModels:
    """Stages 1 and 2 of the quickstart, with the careful judge."""
    prepared = preparation.prepare(
        options.of_seed(seed), algorithm=algorithm, generate=generate
    )
    reward_model = frozen.freeze(prepared.reward_models[0])
    return SeedModels(
        seed,
        frozen.freeze(prepared.reference),
        reward_model,
        rewards.from_model(reward_model, model=algorithm.model),
        prepared.accuracy,
    )


def trainers_of(algorithm: ppo.PPO, options: Config) -> dict[str, Trainer]:
    """Of the algorithms that are asked for, those that train."""
    of_groups = functools.partial(
        trainers.by_groups,
        algorithm=algorithm,
        group_size=options.group_size,
        options=options,
    )
    made = {
        "ppo": lambda: trainers.by_ppo(algorithm, options=options),
        "grpo": lambda: of_groups(trainers.GRPO),
        "rloo": lambda: of_groups(grpo.RLOO),
        "dpo": lambda: trainers.by_dpo(
            algorithm, learning_rate=options.dpo_learning_rate, options=options
        ),
    }
    return {name: made[name]() for name in made if name in options.algorithms}


def train(
    name: str,
    trainer: Trainer,
    models: SeedModels,
    *,
    look: Callable[..., Row],
    job: run.Run,
    options: Config,
) -> Params:
    """One run of one algorithm; samples.jsonl holds what it has come to on the way."""
    stage_state = {
        "train": trainer.start(models.reference.stored),
        "reference": models.reference,
        "root_key": models.train_key,
    }
    every = options.sample_every * trainer.num_steps // options.num_steps
    beside = {"reward model": models.reward_model}
    with job.stage(
        f"{name}_{models.seed}", stage_state, meta={}, beside=beside
    ) as stage:
        left = stage.steps()
        batches = trainer.batches(models) if left else []
        for step in left:
            rows = []
            if step % every == 0:
                policy = trainer.policy(stage.state["train"])
                figures = look(policy, models, num_answers=options.batch_size)
                rows = [{"algorithm": name, "seed": models.seed, **figures}]
            stage.state["train"], stats = trainer.update(
                stage.state["train"],
                batch=batches[step],
                reference=stage.state["reference"],
                reward=models.reward,
                key=jax.random.fold_in(stage.state["root_key"], step),
            )
            stage.end_step(step, stats, rows)
    return trainer.policy(stage.state["train"])


def main(options: Config) -> None:
    started = time.perf_counter()
    algorithm = quickstart.algorithm_of(options)
    by_name = trainers_of(algorithm, options)
    generate = jax.jit(functools.partial(preparation.answers_of, algorithm=algorithm))
    draw = jax.jit(
        functools.partial(
            trainers.sampled, algorithm=algorithm, group_size=2 * max(options.best_of)
        )
    )
    look = looker(algorithm, batch_size=options.batch_size)
    num_steps = {
        f"{name}_{seed}": trainer.num_steps
        for seed in options.seeds
        for name, trainer in by_name.items()
    }
    before: list[Row] = []
    after: list[Row] = []
    accuracies: list[float] = []
    with run.Run(options, num_steps=num_steps) as job:
        for seed in options.seeds:
            models = prepare(
                seed, algorithm=algorithm, generate=generate, options=options
            )
            accuracies.append(models.accuracy)
            final = functools.partial(
                look,
                models=models,
                num_answers=options.num_evaluated,
                to_each=options.num_evaluated // options.num_prompts,
            )
            reference = models.reference.stored
            before.append({"seed": seed, **final(reference)})
            for name, trainer in by_name.items():
                policy = train(
                    name, trainer, models, look=look, job=job, options=options
                )
                after.append({"algorithm": name, "seed": seed, **final(policy)})
            if "best_of_n" in options.algorithms:
                after += best_of(
                    models,
                    draw=draw,
                    sizes=options.best_of,
                    num_prompts=options.num_prompts,
                    batch_size=options.batch_size,
                )
            frozen.verify(models.reference)
            frozen.verify(models.reward_model)
    points = metrics.read(job.folder / "samples.jsonl")
    figures = comparison.summarise(points, before, after, kl_coef=options.kl_coef)
    comparison.tell(figures, kl_coef=options.kl_coef)
    report.side_by_side(
        [
            {"policy": comparison.label(of), "response": of["response"]}
            for of in ({"algorithm": "reference", **before[0]}, *after)
            if of["seed"] == options.seed
        ],
        title=before[0]["prompt"],
    )
    comparison.plot(job.folder, points, before, after)
    summary = {
        **figures,
        "kl_coef": options.kl_coef,
        "responses_for_training": options.num_steps * options.batch_size,
        "reward_model_accuracy": accuracies,
        "responses": [*before, *after],
        "reference_verified": True,
        "seconds": time.perf_counter() - started,
    }
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; figures, samples and plots in {job.folder}")


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
