"""Certificates of GRPO, RLOO and DPO on the world of `certify.py`.

    python experiments certificates.certify_family --out runs/certify_family

The world has 4 tokens, 4 columns and 256 responses, all enumerated (`enumerable.py`).
Two things are certified; the exit status is 1 if one fails:

estimators  The expected gradient of each policy gradient over groups is that of
            E[r] - β·KL up to a named factor, within 1e-5: with responses of one length,
            and with a stop token and responses of 1 to 4 tokens. Biased estimators are
            named, and their bias is detected (`groups.py`).
optimum     GRPO without the std and RLOO, as in any run, come within 0.03 nats of
            π* ∝ π_ref exp(r/β), with β annealed down from 1. DPO, on every pair of
            responses with exact Bradley-Terry labels, comes within 0.01 (`dpo.py`).

GRPO has k2 of responses in the loss. Its group mean includes the response itself, which
scales the reward by (G - 1)/G, so its optimum is that of β·G/(G - 1); groups are of 64.
RLOO has the KL in the reward and no such factor.

Expect all 123 certificates to hold, after 12 minutes on two CPU cores (with other work
beside it). Over seeds 0 to 2 and five β KL(π ‖ π*) was at most 0.0161 nats for GRPO,
0.0009 for RLOO and 0.0013 for DPO, and the identity held to 1e-7. k2 of responses is
noisy: with half the iterations GRPO ended 0.036 nats away in one of the worlds, and
with half the iterations and twice the batch it lost 84% of the optimum.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Literal

import jax
import numpy as np
from worlds import enumerable
from worlds.enumerable import World

from certificates import (
    annealing,
    cases,
    conclusion,
    group_claims,
    penalty_claims,
    verdicts,
)
from certificates.measured import dpo, groups
from certificates.verdicts import Certificate, Policy, Reached
from rlhf_jax import grpo, state
from rlhf_jax.algorithms import optimizers
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import storage
from rlhf_jax.runs import command_line, report, run, run_config

NATS = 0.03  # largest KL(π ‖ π*) at the optimum, for methods without a critic
RECIPES = {
    "grpo": grpo.GroupRecipe(
        penalty=Penalty("k2", placement="loss", per="response"),
        baseline="group",
        temperature=1.0,
    ),
    "rloo": grpo.GroupRecipe(
        penalty=IN_REWARD,
        baseline="leave_one_out",
        temperature=1.0,
    ),
}

NOT_COVERED = (
    "gradients of groups of more than two responses: pairs alone are enumerated",
    "gradients of another policy's samples, or after the first update on a batch",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_worlds: int = 3
    """Number of worlds; their seeds are --seed, --seed + 1, ..."""
    algorithms: tuple[Literal["grpo", "rloo", "dpo"], ...] = ("grpo", "rloo", "dpo")
    """Methods that are to reach the optimum."""
    betas: tuple[float, ...] = (1.0, 0.55, 0.3, 0.17, 0.1)
    """β of each level of GRPO and RLOO, reward units per nat, falling; a level starts
    where the last one ended."""
    iterations: int = 1200
    """Iterations of GRPO and RLOO at each β; a multiple of 25."""
    dpo_betas: tuple[float, ...] = (1.0, 0.3, 0.1)
    """β of the DPO runs."""
    distance: float = 3.5
    """KL from the reference to the optimum at β = 0.1, nats; it scales the rewards."""
    hidden_size: int = 32
    """Width of policy and reference."""
    batch_size: int = 512
    """Responses per iteration."""
    group_size: int = 64
    """Responses per group."""
    num_minibatches: int = 2
    """Optimizer steps per iteration."""
    learning_rate: float = 3e-3
    """Learning rate at the start of each β."""

    def __post_init__(self) -> None:
        super().__post_init__()
        annealing.check_annealing(self.betas, iterations=self.iterations)
        checks.positive(
            num_worlds=self.num_worlds,
            distance=self.distance,
            learning_rate=self.learning_rate,
            **{f"dpo_betas[{i}]": beta for i, beta in enumerate(self.dpo_betas)},
        )
        checks.groups(self.batch_size, group_size=self.group_size, least=2)


def algorithm_of(recipe: grpo.GroupRecipe, options: Config) -> grpo.GRPO:
    """The algorithm of one of `RECIPES`, without options that bias its optimum."""
    chosen = dataclasses.replace(
        recipe, group_size=options.group_size, num_minibatches=options.num_minibatches
    )
    algorithm = grpo.GRPO(
        **vars(chosen),
        model=enumerable.model(hidden_size=options.hidden_size),
        policy_optimizer=optimizers.adam(
            annealing.falling(
                options.learning_rate,
                updates=options.num_minibatches,
                iterations=options.iterations,
            ),
            eps=1e-8,
        ),
        max_new_tokens=enumerable.LENGTH,
        stop_ids=(),
    )
    algorithm.minibatch_size(options.batch_size)
    return algorithm


def certify_estimators(seed: int) -> list[Certificate]:
    """Certifies the gradient of each estimator and prints the table.

    Columns: tokens of a response; the estimator's share of ∇E[r]; its error, relative
    to the largest entry of ∇E[r]; its cosine to the gradient of E[r] - β·KL; and, where
    lengths differ, its share of ∇E[r] at depths 0 to 3.
    """
    findings = []
    for stop_ids in ((), enumerable.STOPS):
        case = cases.draw(seed, stop_ids=stop_ids)
        rows = len(enumerable.every_tokens(stop_ids))
        rewards = np.random.default_rng(seed).normal(size=rows)
        claims = group_claims.CLAIMS + group_claims.means(stops=bool(stop_ids))
        findings += groups.certify(case, rewards, claims=claims)
    report.table(
        f"Expected gradient of each estimator (error at most "
        f"{penalty_claims.TOLERANCE:g}), groups of {group_claims.GROUP}",
        ("estimator", "tokens", "share", "KL", "error", "cosine", "at depths", ""),
        [
            (
                finding.claim.name,
                finding.lengths,
                "biased" if finding.claim.share is None else f"{finding.claim.share:g}",
                finding.claim.in_loss or "in the reward",
                f"{finding.error:.0e}",
                f"{finding.cosine:.4f}",
                " ".join(f"{share:.2f}" for share in finding.depths),
                "holds" if finding.holds else "FAILS",
            )
            for finding in findings
        ],
    )
    for finding in findings:
        if finding.claim.bias:
            print(f"{finding.claim.name} is biased by {finding.claim.bias}")
    return [
        Certificate(
            f"estimator: {finding.claim.name}, {finding.lengths} tokens", finding.holds
        )
        for finding in findings
    ]


def reach_by_dpo(world: World, *, beta: float, model: ModelConfig) -> Policy:
    """The policy that DPO reaches from the reference, without computing a KL."""
    log_policy = dpo.reach(world, beta=beta, model=model)
    return Policy(log_policy, enumerable.divergence(log_policy, world.log_ref))


def main(options: Config) -> None:
    started = time.perf_counter()
    model = enumerable.model(hidden_size=options.hidden_size)
    seeds = range(options.seed, options.seed + options.num_worlds)
    worlds = {
        seed: enumerable.draw(seed, model=model, distance=options.distance)
        for seed in seeds
    }
    over_groups = [name for name in options.algorithms if name in RECIPES]
    num_steps = {
        f"{name}-{seed}": options.iterations
        * len(options.betas)
        // annealing.ITERATIONS_A_STEP
        for name in over_groups
        for seed in seeds
    }
    shown = certify_estimators(options.seed)
    reached: dict[str, list[Reached]] = {}
    with run.Run(options, num_steps=num_steps) as job:
        for name in over_groups:
            algorithm = algorithm_of(RECIPES[name], options)
            train = functools.partial(
                annealing.improve,
                iteration=functools.partial(grpo.iteration, recipe=algorithm),
                betas=options.betas,
                job=job,
                model=model,
                iterations=options.iterations,
                batch_size=options.batch_size,
            )
            reached[name] = []
            for seed, world in worlds.items():
                policies = train(
                    world,
                    name=f"{name}-{seed}",
                    train=state.grpo_state(
                        policy=storage.store(world.start),
                        policy_optimizer=algorithm.policy_optimizer,
                        kl=annealing.annealing(
                            options.betas, iterations=options.iterations
                        ),
                    ),
                    key=jax.random.fold_in(jax.random.key(seed), 1),
                )
                reached[name] += [
                    verdicts.measure(policy, world=world, seed=seed, beta=beta)
                    for beta, policy in zip(options.betas, policies, strict=True)
                ]
        if "dpo" in options.algorithms:
            reached["dpo"] = [
                verdicts.measure(
                    reach_by_dpo(world, beta=beta, model=model),
                    world=world,
                    seed=seed,
                    beta=beta,
                )
                for seed, world in worlds.items()
                for beta in options.dpo_betas
            ]
    for name, figures in reached.items():
        shown += verdicts.show_optimum(
            figures, name=name.upper(), nats=verdicts.NATS if name == "dpo" else NATS
        )
    conclusion.conclude(
        job.folder,
        shown,
        not_covered=(
            *NOT_COVERED,
            "optima of GRPO with the std, of k3 in the loss, of groups of fewer than "
            f"{options.group_size}",
        ),
        figures={
            **{
                name: [figure._asdict() for figure in figures]
                for name, figures in reached.items()
            },
        },
        started=started,
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
