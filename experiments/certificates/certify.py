"""Certificates of KL penalties and PPO, by enumeration of every response.

    python experiments certificates.certify --out runs/certify

The world has 4 tokens, 4 columns and 256 responses (`enumerable.py`), so expectations
are sums and not estimates. Three things are certified; the exit status is 1 if one
fails:

gradients  Every KL estimator, placement and unit has the expected gradient that its
           name states (`gradients.py`), within 1e-5 of autodiff: with responses of one
           length, and with a stop token and the 121 responses of 1 to 4 tokens.
optimum    PPO as in any run (sampler, critic, GAE, clipping) reaches
           π* ∝ π_ref exp(r/β), KL(π ‖ π*) <= 0.01 nats, with β annealed down from 1.
           Runs with a fixed β are reported as well: they tend to lose modes of π*.
frontier   The reward that PPO reaches is the largest that its KL allows.

Each world draws its rewards from a printed seed. They are scaled so that
KL(π_ref ‖ π*) is 3.5 nats at β = 0.1.

Expect all 184 certificates to hold; the record lacks the ten of sampled tails and
mixtures of references. The largest error is 2.4e-6 among the 75 gradients with
responses of one length and 4.5e-6 among the 51 with a stop token. Over seeds 0 to 2 the
annealed policy ends at most 0.0031 nats from π*. With a fixed β it ends at most 0.0012
nats away at 0.3, but 0.023, 0.49 and 0.17 at 0.1, having lost responses with 2 - 38% of
the mass of π*. Recorded in `recorded/certify`: 39 minutes on two CPU cores with other
work beside it; without the 51 gradients, 123 certificates took 9 minutes on idle cores.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from worlds import enumerable

from certificates import conclusion, verdicts
from certificates.annealing import (
    ITERATIONS_A_STEP,
    annealing,
    check_annealing,
    falling,
    improve,
    start,
)
from certificates.cases import draw
from certificates.measured.gradients import certify
from certificates.penalty_claims import OTHERS, TABLE, Claim, Finding
from rlhf_jax import kl_control, ppo
from rlhf_jax.algorithms import optimizers
from rlhf_jax.functional import checks
from rlhf_jax.runs import command_line, run, run_config

Array = jax.Array

FIXED = (0.3, 0.1)  # β of the runs without annealing


class Setting(NamedTuple):
    """The setting of a claim about a gradient."""

    temperature: float
    stop_ids: tuple[int, ...]  # () for responses of one length


NOT_COVERED = (
    "gradients of another policy's samples, or after the first update on a batch",
    "gradients with λ below 1, whitened advantages, clipped values, shaped rewards",
    "groups, several references, episodes: other commands here have them",
    "that a β fixed from the start reaches every optimum: it may lose modes",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_worlds: int = 3
    """Number of worlds; their seeds are --seed, --seed + 1, ..."""
    betas: tuple[float, ...] = (1.0, 0.55, 0.3, 0.17, 0.1)
    """β of each level, reward units per nat, falling; a level starts where the last
    one ended."""
    iterations: int = 600
    """PPO iterations at each β; a multiple of 25."""
    fixed: bool = True
    """Also run with β fixed at 0.3 and 0.1, and report the distances."""
    gradients: Literal["all", "table", "none"] = "all"
    """Which gradients to certify: all of them at two temperatures and with a stop
    token; those of the literature's table at one temperature; or none (PPO only)."""
    distance: float = 3.5
    """KL from the reference to the optimum at β = 0.1, nats; it scales the rewards."""
    hidden_size: int = 32
    """Width of policy, reference and critic."""
    batch_size: int = 512
    """Responses per iteration."""
    num_epochs: int = 1
    """Passes over each batch."""
    num_minibatches: int = 2
    """Optimizer steps per pass."""
    policy_learning_rate: float = 3e-3
    """Learning rate of the policy at the start of each β."""
    critic_learning_rate: float = 1e-2
    """Learning rate of the critic at the start of each β."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_worlds=self.num_worlds,
            distance=self.distance,
            batch_size=self.batch_size,
            policy_learning_rate=self.policy_learning_rate,
            critic_learning_rate=self.critic_learning_rate,
        )
        check_annealing(self.betas, iterations=self.iterations)

    @property
    def claims(self) -> list[tuple[Claim, Setting]]:
        """The claims about gradients, each with its setting."""
        match self.gradients:
            case "all":
                groups = [
                    (Setting(0.7, ()), TABLE + OTHERS),
                    (Setting(1.0, ()), TABLE),
                    (Setting(0.7, enumerable.STOPS), TABLE + OTHERS),
                ]
            case "table":
                groups = [(Setting(0.7, ()), TABLE)]
            case "none":
                groups = []
        return [(claim, setting) for setting, claims in groups for claim in claims]

    @property
    def fixed_betas(self) -> tuple[float, ...]:
        """The fixed β to run: those of `FIXED` that are also among `betas`."""
        return tuple(beta for beta in FIXED if self.fixed and beta in self.betas)

    def iterations_until(self, beta: float) -> int:
        """PPO iterations from the reference to the end of the level `beta`."""
        return self.iterations * (1 + self.betas.index(beta))


def algorithm_of(options: Config) -> ppo.PPO:
    """PPO with sampler, critic, GAE and clip, without options that bias its optimum."""
    model = enumerable.model(hidden_size=options.hidden_size)
    rate = functools.partial(
        falling,
        updates=options.num_epochs * options.num_minibatches,
        iterations=options.iterations,
    )
    algorithm = ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=optimizers.adam(rate(options.policy_learning_rate), eps=1e-8),
        critic_optimizer=optimizers.adam(rate(options.critic_learning_rate), eps=1e-8),
        max_new_tokens=enumerable.LENGTH,
        stop_ids=(),
        temperature=1.0,
        # At the optimum r - β log(π/π_ref) is the same for every response, so with an
        # exact critic the advantages are 0. Whitening would scale up their noise.
        whiten_advantages=None,
        value_clip_range=None,
        vf_coef=0.5,
        num_epochs=options.num_epochs,
        num_minibatches=options.num_minibatches,
    )
    algorithm.minibatch_size(options.batch_size)
    return algorithm


def certify_gradients(job: run.Run, options: Config) -> list[Finding]:
    """Certifies every claim about a gradient; as a stage, so that progress is shown."""
    claims = options.claims
    stage_state = {
        "figures": jnp.zeros((len(claims), len(Finding._fields) - 3), jnp.float32)
    }
    with job.stage("gradients", stage_state, meta={}) as stage:
        left = claims[stage.start :]
        findings = itertools.chain.from_iterable(
            certify(
                draw(options.seed, stop_ids=setting.stop_ids),
                [claim for claim, _ in group],
                temperature=setting.temperature,
            )
            for setting, group in itertools.groupby(left, key=lambda item: item[1])
        )
        for step, finding in zip(stage.steps(), findings, strict=True):
            figures = jnp.asarray(finding[3:], jnp.float32)
            stage.state["figures"] = stage.state["figures"].at[step].set(figures)
            error = (jnp.float32(finding.error), jnp.ones((), jnp.float32))
            stage.end_step(step, {"exact/gradient_error": error})
        figures = np.asarray(stage.state["figures"])
    return [
        Finding(claim, setting.temperature, bool(setting.stop_ids), *map(float, row))
        for (claim, setting), row in zip(claims, figures, strict=True)
    ]


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number


def main(options: Config) -> None:
    started = time.perf_counter()
    algorithm = algorithm_of(options)
    seeds = range(options.seed, options.seed + options.num_worlds)
    worlds = {
        seed: enumerable.draw(seed, model=algorithm.model, distance=options.distance)
        for seed in seeds
    }
    steps_of = {
        f"annealed-{seed}": options.iterations_until(options.betas[-1])
        for seed in seeds
    } | {
        f"fixed-{beta:g}-{seed}": options.iterations_until(beta)
        for beta in options.fixed_betas
        for seed in seeds
    }
    num_steps = {name: count // ITERATIONS_A_STEP for name, count in steps_of.items()}
    if options.claims:
        num_steps = {"gradients": len(options.claims)} | num_steps
    schedule = annealing(options.betas, iterations=options.iterations)
    annealed, fixed = [], []
    with run.Run(options, num_steps=num_steps) as job:
        findings = certify_gradients(job, options) if options.claims else []
        train = functools.partial(
            improve,
            iteration=functools.partial(ppo.iteration, recipe=algorithm),
            job=job,
            model=algorithm.model,
            iterations=options.iterations,
            batch_size=options.batch_size,
        )
        for seed, world in worlds.items():
            key = jax.random.fold_in(jax.random.key(seed), 1)
            policies = train(
                world,
                name=f"annealed-{seed}",
                train=start(world, algorithm, jax.tree.map(jnp.copy, schedule)),
                betas=options.betas,
                key=key,
            )
            annealed += [
                verdicts.measure(policy, world=world, seed=seed, beta=beta)
                for beta, policy in zip(options.betas, policies, strict=True)
            ]
        for beta, (seed, world) in itertools.product(
            options.fixed_betas, worlds.items()
        ):
            policies = train(
                world,
                name=f"fixed-{beta:g}-{seed}",
                train=start(world, algorithm, kl_control.fixed(beta)),
                betas=(beta,) * (1 + options.betas.index(beta)),
                key=jax.random.fold_in(jax.random.key(seed), 1),
            )
            fixed.append(
                verdicts.measure(policies[-1], world=world, seed=seed, beta=beta)
            )
    shown = [
        *(verdicts.show_gradients(findings) if findings else []),
        *verdicts.show_optimum(annealed, fixed),
        *verdicts.show_frontier(annealed),
    ]
    verdicts.plot(job.folder / "plots" / "frontier.png", worlds, annealed, fixed)
    conclusion.conclude(
        job.folder,
        shown,
        not_covered=NOT_COVERED,
        figures={
            "gradients": [
                {
                    "estimator": finding.estimator,
                    "place": finding.place,
                    "temperature": finding.temperature,
                    "lengths": finding.lengths,
                    "gradient": finding.claim.gradient
                    or finding.claim.penalty.gradient,
                    "error": _or_none(finding.error),
                    "nearest": _or_none(finding.nearest),
                    "value": _or_none(finding.value),
                    "bias": _or_none(finding.bias),
                }
                for finding in findings
            ],
            "annealed": [reached._asdict() for reached in annealed],
            "fixed": [reached._asdict() for reached in fixed],
        },
        started=started,
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
