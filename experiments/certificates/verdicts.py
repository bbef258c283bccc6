"""Tables, plot and certificates of the policies that `certify.py` trains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from worlds import enumerable
from worlds.enumerable import Float64, World

from certificates import penalty_claims
from certificates.penalty_claims import Finding
from rlhf_jax.runs import report

NATS = 0.01  # largest KL(π ‖ π*) of a policy at the optimum
IDENTITY = 1e-5  # largest error of J(π*) - J(π) = β·KL(π ‖ π*), reward units
FARTHEST = 3.0  # smallest KL(π_ref ‖ π*) at the smallest β, nats
MISSED = 0.1  # a response is lost if π(y) is below this share of π*(y)


class Certificate(NamedTuple):
    """A named claim, and whether it holds."""

    name: str
    holds: bool


class Policy(NamedTuple):
    """The log-probs and the KL of a policy."""

    log_policy: Float64  # [256], log π(y), nats
    kl: float  # KL(π ‖ π_ref), nats, as `score` computes it


class Reached(NamedTuple):
    """The exact measurements of a policy at the β of its training."""

    seed: int  # seed of the world
    beta: float  # reward units per nat
    start: float  # KL(π_ref ‖ π*), nats
    distance: float  # KL(π ‖ π*), nats
    missed: float  # mass of π* on responses that π has lost
    identity: float  # |J(π*) - J(π) - β·KL(π ‖ π*)|, reward units
    kl: float  # KL(π ‖ π_ref), nats
    reward: float  # E_π[r], reward units
    below: float  # distance below the frontier at this KL, reward units


def measure(policy: Policy, *, world: World, seed: int, beta: float) -> Reached:
    """Measures one policy by sums over all responses.

    The KL in J(π) is computed by the library, so the identity also checks this KL.
    """
    log_policy = policy.log_policy
    best = world.optimum(beta)
    distance = enumerable.divergence(log_policy, best.log_policy)
    missing = log_policy < best.log_policy + math.log(MISSED)
    return Reached(
        seed=seed,
        beta=beta,
        start=enumerable.divergence(world.log_ref, best.log_policy),
        distance=distance,
        missed=float(np.exp(best.log_policy)[missing].sum()),
        identity=abs(
            best.value
            - (enumerable.expected_reward(log_policy, world.rewards) - beta * policy.kl)
            - beta * distance
        ),
        kl=enumerable.divergence(log_policy, world.log_ref),
        reward=enumerable.expected_reward(log_policy, world.rewards),
        below=world.below_frontier(log_policy),
    )


def show_gradients(findings: Sequence[Finding]) -> list[Certificate]:
    """Prints the table of gradients and returns its certificates.

    Columns after the error: the distance to the nearest of the KLs' gradients and zero,
    and the bias of the mean estimate from KL(π ‖ π_ref), nats.
    """
    report.table(
        f"Expected gradient of each penalty (error at most "
        f"{penalty_claims.TOLERANCE:g} of its largest entry)",
        (
            *("estimator", "in, per", "T", "tokens"),
            *("gradient of", "error", "to KLs", "bias", ""),
        ),
        [
            (
                finding.estimator,
                finding.place,
                f"{finding.temperature:g}",
                finding.lengths,
                finding.claim.gradient or finding.claim.penalty.gradient,
                f"{finding.error:.0e}",
                f"{finding.nearest:.0e}",
                "" if math.isnan(finding.bias) else f"{finding.bias:.0e}",
                _verdict(finding.holds),
            )
            for finding in findings
        ],
    )
    return [
        Certificate(
            f"gradient: {finding.estimator}, in {finding.place}, T "
            f"{finding.temperature:g}, {finding.lengths} tokens",
            finding.holds,
        )
        for finding in findings
    ]


def show_optimum(
    annealed: Sequence[Reached],
    fixed: Sequence[Reached] = (),
    *,
    name: str = "PPO",
    nats: float = NATS,
) -> list[Certificate]:
    """Prints the distance to each optimum and returns the certificates.

    Columns: KL(. ‖ π*) of the reference, of the annealed policy and of the policy with
    a fixed β; the mass of π* on responses that each policy has lost; and the error of
    J(π*) - J(π) = β·KL(π ‖ π*), reward units.
    """
    beside = {(reached.seed, reached.beta): reached for reached in fixed}
    rows, certificates = [], []
    for reached in annealed:
        same = beside.get((reached.seed, reached.beta))
        where = f"{name}, seed {reached.seed}, beta {reached.beta:g}"
        verdicts = {
            f"optimum: {where}": reached.distance <= nats,
            f"identity: {where}": reached.identity <= IDENTITY,
        }
        if reached.beta == enumerable.SMALLEST_BETA:
            verdicts[f"world: {where}"] = reached.start >= FARTHEST
        certificates += itertools.starmap(Certificate, verdicts.items())
        rows.append(
            (
                str(reached.seed),
                f"{reached.beta:g}",
                f"{reached.start:.3f}",
                f"{reached.distance:.4f}",
                f"{same.distance:.4f}" if same else "",
                f"{reached.missed:.1%}",
                f"{same.missed:.1%}" if same else "",
                f"{reached.identity:.0e}",
                _verdict(all(verdicts.values())),
            )
        )
    report.table(
        f"{name} and the optimum: KL(π ‖ π*) [nats] at most {nats:g}",
        ("seed", "β", "π_ref", "π", "β fixed", "lost", "β fixed", "error", ""),
        rows,
    )
    return certificates


def show_frontier(annealed: Sequence[Reached]) -> list[Certificate]:
    """Prints the distance below the frontier and returns the certificates.

    No policy is above the frontier. A policy at a distance of d nats from the optimum
    is at most β·d below it.
    """
    rows, certificates = [], []
    for reached in annealed:
        limit = reached.beta * NATS
        holds = -IDENTITY <= reached.below <= limit
        where = f"seed {reached.seed}, beta {reached.beta:g}"
        certificates.append(Certificate(f"frontier: {where}", holds))
        row = (
            f"{number:.4f}"
            for number in (reached.kl, reached.reward, reached.below, limit)
        )
        rows.append((str(reached.seed), f"{reached.beta:g}", *row, _verdict(holds)))
    report.table(
        "PPO and the frontier of reward and KL",
        ("seed", "β", "KL [nats]", "reward", "below", "at most", ""),
        rows,
    )
    return certificates


def plot(
    path: Path,
    worlds: Mapping[int, World],
    annealed: Sequence[Reached],
    fixed: Sequence[Reached],
) -> None:
    """Plots the exact frontier of each world and the policies of PPO."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for number, (seed, world) in enumerate(worlds.items()):
        colour = colormaps["tab10"](number % 10)
        kl = np.array([reached.kl for reached in annealed if reached.seed == seed])
        within = world.frontier.kl <= 1.2 * kl.max(initial=1.0)
        axis.plot(
            world.frontier.kl[within],
            world.frontier.reward[within],
            color=colour,
            linewidth=1,
            label=f"exact, seed {seed}",
        )
        for reached, marker, face in (
            *((reached, "o", colour) for reached in annealed if reached.seed == seed),
            *((reached, "s", "none") for reached in fixed if reached.seed == seed),
        ):
            axis.plot(
                reached.kl,
                reached.reward,
                marker,
                color=colour,
                markerfacecolor=face,
                markersize=5,
            )
    axis.plot([], [], "o", color="grey", label="PPO, β annealed")
    axis.plot([], [], "s", color="grey", markerfacecolor="none", label="PPO, β fixed")
    axis.set_xlabel("KL(π ‖ π_ref) [nats per response]")
    axis.set_ylabel("expected reward [reward units]")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "FAILS"
