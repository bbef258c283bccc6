"""Certificates of two references: expected gradients and the optimum.

    python experiments certificates.certify_references --out runs/certify_references

The world has 4 tokens, 4 columns and 256 responses (`enumerable.py`), or 121 responses
of 1 to 4 tokens if one token ends a response. A second reference of another width has
half the weight of the first: β_1 = β, β_2 = β/2. The exit status is 1 if one fails:

gradients  Every KL estimator, placement and unit of `penalty_claims.TABLE` has, with
           rewards, the expected gradient of E[r] - Σ_i β_i·D_i within 1e-5 of its
           largest entry, where D_i is the divergence it names, between π and π_i. For
           the full reverse KL this is ∇(E[r] - Σ_i β_i·KL(π ‖ π_i)).
optimum    PPO as in any run, with k1 in the reward and β annealed down from 1, reaches
           π* ∝ Π_i π_i^(β_i/Σβ)·exp(r/Σβ): KL(π ‖ π*) <= 0.01 nats.
identity   J(π*) - J(π) = Σβ·KL(π ‖ π*), with the KLs of J(π) computed as in a run.

Expect all 54 certificates to hold: the largest error of a gradient is 1.7e-6, and over
seeds 0 to 2 the annealed policy ends at most 0.0022 nats from π*. Recorded in
`recorded/certify_references`: 25 minutes on two CPU cores with other work beside it.

Source of the optimum: Aminian et al. 2025, arXiv:2502.01203, section 5.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from worlds import enumerable
from worlds.enumerable import Float64, World

from certificates import annealing, certify, conclusion, verdicts
from certificates.cases import Case, draw, flat
from certificates.measured import expected_gradients, gradients
from certificates.measured.expected_gradients import Key
from certificates.measured.gradients import BETA, Flat
from certificates.penalty_claims import TABLE, TOLERANCE, Claim
from certificates.verdicts import Certificate, Policy, Reached
from rlhf_jax import frozen, ppo
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.gradients import FULL_REVERSE
from rlhf_jax.roles.reference.frozen import Frozen, Further
from rlhf_jax.runs import command_line, report, run, run_config

Params = Any
Known = dict[Key, Params]
WEIGHT = 0.5  # β_2 / β_1
TOTAL = 1.0 + WEIGHT  # Σβ / β_1
TEMPERATURE = 0.7  # temperature of the certified gradients
LEAST_SHARE = 0.05  # smallest share of a gradient due to the second reference

NOT_COVERED = (
    "more than two references, and weights other than 1 and 1/2",
    "penalties that `certify` alone has, references that move, older samples",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_worlds: int = 3
    """Number of worlds; their seeds are --seed, --seed + 1, ..."""
    betas: tuple[float, ...] = (1.0, 0.55, 0.3, 0.17, 0.1)
    """β_1 of each level, reward units per nat, falling; a level starts where the last
    one ended."""
    iterations: int = 600
    """PPO iterations at each β; a multiple of 25."""
    distance: float = 3.5
    """KL from the first reference to its own optimum at β = 0.1, nats."""
    hidden_size: int = 32
    """Width of policy, first reference and critic; the second reference has half."""
    batch_size: int = 512
    """Responses per iteration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(num_worlds=self.num_worlds, distance=self.distance)
        annealing.check_annealing(self.betas, iterations=self.iterations)


class Finding(NamedTuple):
    """The measurements of a claim about a gradient."""

    claim: Claim
    error: float  # max|measured - expected| / max|expected|
    second: float  # max|part of the second reference| / max|expected|


def second(seed: int, *, hidden_size: int) -> Further:
    """A reference of another width, at half the weight of the first."""
    shape = enumerable.model(hidden_size=hidden_size)
    init = jax.jit(functools.partial(enumerable.init, model=shape))
    params = init(jax.random.fold_in(jax.random.key(seed), 2))
    return Further(frozen.freeze(params, model=shape), weight=WEIGHT)


class Expected(NamedTuple):
    """Expected gradients, by autodiff of sums over all responses."""

    reward: Flat  # ∇E[r]
    references: tuple[Known, Known]  # KL gradients of the first and second reference


def expected(case: Case, *, other: Further, rewards: Float64) -> Expected:
    """The gradients of which penalties are sums, computed from logits alone."""

    def of_reward(params: object) -> jax.Array:
        chances = enumerable.log_probabilities(
            params, temperature=TEMPERATURE, **case.options
        )
        return jnp.exp(chances) @ jnp.asarray(rewards, jnp.float32)

    def known(reference: Frozen) -> Known:
        return expected_gradients.of_penalties(
            case.policy,
            frozen.read(reference),
            ref_model=reference.model,
            temperature=TEMPERATURE,
            **case.options,
        )

    assert other.frozen is not None
    return Expected(
        flat(jax.jit(jax.grad(of_reward))(case.policy)),
        (known(case.reference), known(other.frozen)),
    )


def of_claim(
    claim: Claim, case: Case, *, other: Further, rewards: Float64, known: Expected
) -> Finding:
    """Compares a gradient measured through the code of a run with autodiff."""
    scored = gradients.sample(case, older=False, temperature=TEMPERATURE)
    measured, _ = gradients.measure(
        case.policy,
        sampler=case.policy,
        critic=case.critic,
        reference=case.reference,
        scored=dataclasses.replace(scored, scores=jnp.asarray(rewards, jnp.float32)),
        algorithm=gradients.algorithm_of(
            claim.penalty, case=case, temperature=TEMPERATURE
        ),
        further={"second": other},
    )
    chosen = claim.penalty
    first, second = (
        sum(
            (
                BETA * times * flat(of_reference[name, chosen.per])
                for name, times in chosen.terms.items()
            ),
            start=np.zeros_like(known.reward),
        )
        for of_reference in known.references
    )
    loss = first + WEIGHT * second - known.reward
    scale = np.abs(loss).max()
    return Finding(
        claim,
        error=float(np.abs(flat(measured) - loss).max() / scale),
        second=float(np.abs(WEIGHT * second).max() / scale),
    )


def certify_gradients(seed: int) -> tuple[list[Finding], list[Certificate]]:
    """Certifies the gradients and prints the table."""
    case = draw(seed, stop_ids=enumerable.STOPS)
    other = second(seed, hidden_size=8)
    count = len(enumerable.every_tokens(case.stop_ids))
    rewards = np.random.default_rng(seed).normal(size=count)
    known = expected(case, other=other, rewards=rewards)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table names the penalties that are no KL
        findings = [
            of_claim(claim, case, other=other, rewards=rewards, known=known)
            for claim in TABLE
        ]
    shown = []
    for finding in findings:
        moved = not finding.claim.penalty.terms or finding.second > LEAST_SHARE
        name = f"{_name(finding.claim)}, seed {seed}"
        shown.append(
            Certificate(f"gradient: {name}", finding.error <= TOLERANCE and moved)
        )
    report.table(
        f"Expected gradient with two references, seed {seed} (error at most "
        f"{TOLERANCE:g})",
        ("penalty", "of each reference", "error", "second", ""),
        [
            (
                _name(finding.claim),
                finding.claim.penalty.gradient,
                f"{finding.error:.0e}",
                f"{finding.second:.2f}",
                "holds" if certificate.holds else "FAILS",
            )
            for finding, certificate in zip(findings, shown, strict=True)
        ],
    )
    return findings, shown


def _name(claim: Claim) -> str:
    chosen = claim.penalty
    return f"{chosen.value_estimator} in {chosen.placement}, per {chosen.per}"


def between(world: World, other: Further) -> World:
    """The world with the unnormalised reference Π π_i^(β_i/Σβ).

    Its J(π) = E[r] - Σβ·KL(π ‖ Π π_i^(β_i/Σβ)) equals that of the two references.
    """
    assert other.frozen is not None
    assert other.frozen.model is not None
    log_second = enumerable.known(
        other.frozen.stored, model=other.frozen.model, temperature=1.0
    )
    return dataclasses.replace(
        world, log_ref=(world.log_ref + WEIGHT * log_second) / TOTAL
    )


def reach(
    world: World, other: Further, *, seed: int, job: run.Run, options: Config
) -> list[Reached]:
    """Trains PPO from the first reference and measures it at the end of each β."""
    algorithm = certify.algorithm_of(
        certify.Config(
            out=options.out,
            iterations=options.iterations,
            hidden_size=options.hidden_size,
            batch_size=options.batch_size,
            betas=options.betas,
        )
    )
    mixed = between(world, other)
    totals = tuple(TOTAL * beta for beta in options.betas)
    policies = annealing.improve(
        mixed,
        name=f"annealed-{seed}",
        train=annealing.start(
            world,
            algorithm,
            annealing.annealing(options.betas, iterations=options.iterations),
        ),
        iteration=functools.partial(ppo.iteration, recipe=algorithm),
        betas=totals,
        key=jax.random.fold_in(jax.random.key(seed), 1),
        job=job,
        model=algorithm.model,
        iterations=options.iterations,
        batch_size=options.batch_size,
        further={"second": other},
    )
    reached = []
    for total, policy in zip(totals, policies, strict=True):
        figures = verdicts.measure(
            Policy(policy.log_policy, policy.kl / TOTAL),  # KL to the product
            world=mixed,
            seed=seed,
            beta=total,
        )
        best = mixed.optimum(total).log_policy
        start = enumerable.divergence(world.log_ref, best)  # of the first reference
        reached.append(figures._replace(start=start))
    return reached


def main(options: Config) -> None:
    """Prints the tables; raises StopError if a certificate fails."""
    started = time.perf_counter()
    model = enumerable.model(hidden_size=options.hidden_size)
    seeds = range(options.seed, options.seed + options.num_worlds)
    steps = options.iterations * len(options.betas) // annealing.ITERATIONS_A_STEP
    findings, shown = certify_gradients(options.seed)
    reached: list[Reached] = []
    num_steps = {f"annealed-{seed}": steps for seed in seeds}
    with run.Run(options, num_steps=num_steps) as job:
        for seed in seeds:
            world = enumerable.draw(seed, model=model, distance=options.distance)
            other = second(seed, hidden_size=options.hidden_size // 2)
            reached += reach(world, other, seed=seed, job=job, options=options)
    shown += [
        certificate
        for certificate in verdicts.show_optimum(reached, name="PPO, two references")
        if not certificate.name.startswith("world")
    ]
    conclusion.conclude(
        job.folder,
        shown,
        not_covered=NOT_COVERED,
        figures={
            "gradients": [
                {
                    "penalty": _name(finding.claim),
                    "of each reference": finding.claim.penalty.gradient,
                    "is the gradient of E[r] less the KLs": finding.claim.gradient
                    == FULL_REVERSE,
                    "error": finding.error,
                    "second": finding.second,
                }
                for finding in findings
            ],
            "annealed": [
                figure._asdict()
                | {"sum_of_betas": figure.beta, "beta": figure.beta / TOTAL}
                for figure in reached
            ],
        },
        started=started,
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
