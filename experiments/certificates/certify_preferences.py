"""Certificates of preferences: cDPO, robust DPO, KTO, SimPO, online DPO, Nash-MD.

    python experiments certificates.certify_preferences --out runs/certify_preferences

The world has 4 tokens, 4 columns and 256 responses, all enumerated (`enumerable.py`).
Offline losses are summed over all pairs of responses, weighted by the probability of
each label (`preferences.py`); online DPO and Nash-MD sample and train as in a run. The
exit status is 1 if one of these fails:

formula  The gradient of the expected loss is that of the formula, within 1e-5.
optimum  Training ends within 0.01 nats (Nash-MD: 0.02) of the named policy; a biased
         method is shown not to end at π* ∝ π_ref exp(r/β).

If a fifth of the labels is flipped, robust DPO has DPO's gradient on clean labels and
reaches π*; DPO and cDPO do not. KTO has no optimum: it moves on towards the responses
that most labels call desirable, and its z0 is 0 at any distance. The optimum of SimPO
does not depend on the reference. Online DPO reaches π* if the judge prefers with the
Bradley-Terry probability; if the higher score always wins, it collapses onto one
response, which need not be the best. Nash-MD reaches its fixed point,
π ∝ π_ref exp(P(y beats π^mix)/τ), where π^mix mixes the distributions of each token, as
its sampler does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from worlds import enumerable
from worlds.enumerable import Float64, World

from certificates import annealing, conclusion, verdicts
from certificates.measured import preferences
from certificates.penalty_claims import TOLERANCE
from rlhf_jax import kl_control, online_dpo, state
from rlhf_jax.algorithms import nash_md, optimizers
from rlhf_jax.algorithms.online_dpo.recipe import Labels
from rlhf_jax.algorithms.state import Optimizer
from rlhf_jax.functional import checks
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import storage
from rlhf_jax.runs import command_line, report, run, run_config

LEAST_DISTANCE = 0.03  # smallest KL(π ‖ π*), nats, that shows a claimed bias
SIMPO_BETA = 2.0
MIXTURE = 0.125  # share of the reference in the mixture of Nash-MD
NASH_NATS = 0.02  # largest KL to the fixed point of Nash-MD, which has no baseline


class Finding(NamedTuple):
    """The measurements of a method."""

    method: str
    optimum: str  # the policy that training should reach, or what happens instead
    error: float  # of the gradient against the formula; NaN if gradients are sampled
    distance: float  # KL from π to the named policy, nats
    from_best: float  # KL(π ‖ π*), nats; NaN for Nash-MD, which has no π*
    biased: bool
    within: float = verdicts.NATS  # largest `distance` that holds, nats

    @property
    def holds(self) -> bool:
        """Whether gradient and final policy are as named, and any bias is detected."""
        small = math.isnan(self.error) or self.error <= TOLERANCE
        ends = self.from_best > LEAST_DISTANCE if self.biased else True
        return small and ends and not self.distance > self.within


NOT_COVERED = (
    "policies that are not tables of logits, for the offline losses",
    "finite data: every pair and label counts by its probability",
    "IPO, ORPO, weights of texts, and a reference that moves",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_worlds: int = 3
    """Number of worlds; their seeds are --seed, --seed + 1, ..."""
    beta: float = 0.3
    """β of all losses but SimPO's, reward units per nat."""
    tau: float = 0.1
    """KL coefficient of Nash-MD, per nat; its rewards are probabilities."""
    flip_rate: float = 0.2
    """Probability that a label is flipped."""
    steps: int = preferences.STEPS
    """Adam steps of the offline losses, each on all pairs."""
    iterations: int = 800
    """Iterations of online DPO; a multiple of 25."""
    nash_iterations: int = 1600
    """Iterations of Nash-MD, whose gradient is noisier; a multiple of 25."""
    distance: float = 3.5
    """KL from the reference to the optimum at β = 0.1, nats; it scales the rewards."""
    hidden_size: int = 32
    """Width of the reference and of the policies that sample."""
    batch_size: int = 512
    """Responses per iteration of online DPO and Nash-MD."""
    learning_rate: float = 3e-3
    """Initial learning rate of online DPO and Nash-MD."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for iterations in (self.iterations, self.nash_iterations):
            annealing.check_annealing((self.beta,), iterations=iterations)
        checks.positive(
            num_worlds=self.num_worlds,
            distance=self.distance,
            steps=self.steps,
            tau=self.tau,
            learning_rate=self.learning_rate,
        )
        if not 0 < self.flip_rate < 0.5:
            raise checks.InputError(
                f"flip_rate: expected a rate above 0 and below 0.5, got "
                f"{self.flip_rate}; choose another"
            )


def offline(world: World, options: Config) -> list[Finding]:
    """DPO, cDPO and robust DPO under flipped labels; SimPO and KTO."""
    beta, rate = options.beta, options.flip_rate
    best = world.optimum(beta).log_policy
    clean = preferences.clean(world.rewards)
    noisy = preferences.flipped(clean, rate)
    twice = preferences.flipped(noisy, rate)
    rng = np.random.default_rng(0)
    somewhere = world.log_ref + rng.normal(size=len(best))
    somewhere -= np.logaddexp.reduce(somewhere)
    cases = {  # DPO: (labels, options, the labels whose gradient it should have)
        "DPO, clean labels": (clean, {}, clean),
        "DPO, flipped labels": (noisy, {}, noisy),
        "cDPO, clean labels": (clean, {"label_smoothing": rate}, noisy),
        "cDPO, flipped labels": (noisy, {"label_smoothing": rate}, twice),
        "robust DPO, flipped labels": (
            noisy,
            {"kind": "robust", "label_smoothing": rate},
            clean,
        ),
    }
    findings = []
    for method, (labels, choices, target) in cases.items():
        loss = preferences.dpo(world, labels, beta=beta, **choices)
        named = preferences.dpo_gradient(world, somewhere, target, beta=beta)
        reached = preferences.reach(loss, world, steps=options.steps)
        optimum = preferences.dpo_optimum(world, target, beta=beta)
        exact = target is clean
        findings.append(
            Finding(
                method,
                "π*" if exact else f"of labels flipped {1 + (target is twice)}x",
                error(preferences.gradient(loss, somewhere), named),
                enumerable.divergence(reached, best if exact else optimum),
                enumerable.divergence(reached, best),
                biased=not exact,
            )
        )
    return [*findings, _simpo(world, options), _kto(world, options, somewhere)]


def error(measured: Float64, named: Float64) -> float:
    """Returns max|measured - named| / max|named|."""
    return float(np.abs(measured - named).max() / np.abs(named).max())


def _simpo(world: World, options: Config) -> Finding:
    loss = preferences.simpo(world, beta=SIMPO_BETA)
    reached = preferences.reach(loss, world, steps=options.steps)
    best = world.optimum(SIMPO_BETA / enumerable.LENGTH).log_policy
    return Finding(
        "SimPO, clean labels",
        "exp(L·r/β), no reference",
        math.nan,
        enumerable.divergence(
            reached, preferences.simpo_optimum(world, beta=SIMPO_BETA)
        ),
        enumerable.divergence(reached, best),
        biased=True,
    )


def _kto(world: World, options: Config, somewhere: Float64) -> Finding:
    """KTO keeps only the responses that most labels call desirable."""
    loss = preferences.kto(world, beta=options.beta)
    reached = preferences.reach(loss, world, steps=options.steps)
    best = world.optimum(options.beta).log_policy
    good = preferences.desirable(world) > 0.5
    left = float(np.log(np.exp(reached)[good].sum()))
    print(
        f"KTO: {np.exp(left):.6f} of π on responses that most labels call desirable, "
        f"{np.exp(best)[good].sum():.3f} of π*; KL to the reference "
        f"{enumerable.divergence(reached, world.log_ref):.2f} nats, z0 "
        f"{max(0.0, float((reached - world.log_ref).mean())):.2f}"
    )
    return Finding(
        "KTO",
        "none: π(mostly desirable) = 1",
        error(
            preferences.gradient(loss, somewhere),
            preferences.kto_gradient(world, somewhere, beta=options.beta),
        ),
        -left,  # min KL(p ‖ π) over policies p on these responses
        enumerable.divergence(reached, best),
        biased=True,
    )


def online(
    world: World, options: Config, *, labels: Labels, seed: int, job: run.Run
) -> Finding:
    """Online DPO as in a run, with sampled pairs and the frozen reference."""
    model = enumerable.model(hidden_size=options.hidden_size)
    algorithm = online_dpo.OnlineDPO(labels=labels, **_shapes(options, model))
    log_policy = _trained(
        world,
        options,
        iteration=functools.partial(online_dpo.iteration, recipe=algorithm),
        optimizer=algorithm.policy_optimizer,
        name=f"{labels}-{seed}",
        coefficient=options.beta,
        seed=seed,
        job=job,
    )
    best = world.optimum(options.beta).log_policy
    distance = enumerable.divergence(log_policy, best)
    exact = labels == "bradley_terry"
    left = -float(log_policy.max())  # KL(p ‖ π) of the likeliest response alone
    if not exact:
        place = log_policy.argmax()
        better = int((world.rewards > world.rewards[place]).sum())
        print(
            f"online DPO, the higher score always wins: {np.exp(-left):.3f} of π on a "
            f"response, {better} have higher rewards; {np.exp(best[place]):.3f} of π*"
        )
    return Finding(
        f"online DPO, labels {labels}",
        "π*" if exact else "none: one response alone",
        math.nan,
        distance if exact else left,
        distance,
        biased=not exact,
    )


def nash(world: World, options: Config, *, seed: int, job: run.Run) -> Finding:
    """Nash-MD as in a run, with opponents drawn from the mixture."""
    options = dataclasses.replace(options, iterations=options.nash_iterations)
    model = enumerable.model(hidden_size=options.hidden_size)
    algorithm = nash_md.NashMD(
        mixture=MIXTURE, temperature=1.0, **_shapes(options, model)
    )
    log_policy = _trained(
        world,
        options,
        iteration=functools.partial(nash_md.iteration, recipe=algorithm),
        optimizer=algorithm.policy_optimizer,
        name=f"nash_md-{seed}",
        coefficient=options.tau,
        seed=seed,
        job=job,
    )
    fixed_point = preferences.nash(world, tau=options.tau, share=MIXTURE)
    return Finding(
        "Nash-MD",
        "exp(P(y beats π^mix)/τ)·π_ref",
        math.nan,
        enumerable.divergence(log_policy, fixed_point),
        math.nan,
        biased=False,
        within=NASH_NATS,
    )


def _trained(
    world: World,
    options: Config,
    *,
    iteration: annealing.Iteration,
    optimizer: Optimizer,
    name: str,
    coefficient: float,
    seed: int,
    job: run.Run,
) -> Float64:
    """f64[256]: log π, nats, after training from the reference."""
    train = state.grpo_state(
        policy=storage.store(world.start),
        policy_optimizer=optimizer,
        kl=kl_control.fixed(coefficient),
    )
    [policy] = annealing.improve(
        world,
        name=name,
        train=train,
        iteration=iteration,
        betas=(options.beta,),
        key=jax.random.fold_in(jax.random.key(seed), 1),
        job=job,
        model=enumerable.model(hidden_size=options.hidden_size),
        iterations=options.iterations,
        batch_size=options.batch_size,
    )
    return policy.log_policy


def _shapes(options: Config, model: ModelConfig) -> dict[str, Any]:
    """Options that online DPO and Nash-MD share."""
    schedule = annealing.falling(
        options.learning_rate, updates=1, iterations=options.iterations
    )
    return {
        "model": model,
        "policy_optimizer": optimizers.adam(schedule, eps=1e-8),
        "max_new_tokens": enumerable.LENGTH,
        "stop_ids": (),
    }


def show(findings: list[Finding], *, seed: int) -> None:
    """Prints the table of one world."""
    report.table(
        f"Losses of preferences, seed {seed}: KL to what is named at most "
        f"{verdicts.NATS:g} nats (Nash-MD: {NASH_NATS:g})",
        ("method", "ends at", "formula", "KL to it", "KL to π*", ""),
        [
            (
                finding.method,
                finding.optimum,
                "" if math.isnan(finding.error) else f"{finding.error:.0e}",
                f"{finding.distance:.1e}",
                "" if math.isnan(finding.from_best) else f"{finding.from_best:.1e}",
                "holds" if finding.holds else "FAILS",
            )
            for finding in findings
        ],
    )


def main(options: Config) -> None:
    """Prints the tables; raises StopError if a certificate fails."""
    started = time.perf_counter()
    model = enumerable.model(hidden_size=options.hidden_size)
    seeds = range(options.seed, options.seed + options.num_worlds)
    kinds: tuple[Labels, ...] = ("bradley_terry", "ranked")
    iterations = dict.fromkeys(kinds, options.iterations)
    num_steps = {
        f"{name}-{seed}": count // annealing.ITERATIONS_A_STEP
        for seed in seeds
        for name, count in {**iterations, "nash_md": options.nash_iterations}.items()
    }
    rows, shown = [], {}
    with run.Run(options, num_steps=num_steps) as job:
        for seed in seeds:
            world = enumerable.draw(seed, model=model, distance=options.distance)
            findings = offline(world, options)
            findings += [
                online(world, options, labels=kind, seed=seed, job=job)
                for kind in kinds
            ]
            findings.append(nash(world, options, seed=seed, job=job))
            show(findings, seed=seed)
            shown |= {
                f"{finding.method}, seed {seed}": finding.holds for finding in findings
            }
            rows += [
                {"seed": seed}
                | {
                    name: None if value != value else value
                    for name, value in finding._asdict().items()
                }
                for finding in findings
            ]
    conclusion.conclude(
        job.folder,
        list(shown.items()),
        not_covered=NOT_COVERED,
        figures={"findings": rows},
        started=started,
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
