"""Certificates of ratios, surrogates and masks: GSPO, CISPO, SAPO, DAPO and others.

    python experiments certificates.certify_ratios --out runs/certify_ratios

The world has 4 tokens, one of which ends a response; all 121 responses of 1 to 4 tokens
and all their pairs are enumerated (`ratios.py`). The command prints two tables with a
row per method, and the exit status is 1 if one fails:

target   On the sampler's policy the expected gradient, measured through the experience
         and the loss of a run, is that of the named target within 1e-5, or it is shown
         to be biased and the reason is named.
formula  After 0, 1, 2 and 4 updates on samples of the first policy it is, within 1e-5,
         the gradient of the paper's formula, which is implemented a second time here.
cosine   Cosine of the expected gradient to ∇E[r] of the current policy.
optimum  At π* ∝ π_ref exp(r/β), with the KL in the reward, it is 0.

Three more certificates follow. Dynamic sampling, which draws groups until their rewards
differ, scales the gradient of the reward by 1/P(mixed) and changes the direction of
that of a KL in the loss. Gradient regularisation adds half the gradient of the
surrogate's squared gradient norm, which is not that of E[r]. DAR moves towards the
policy that it regresses onto and stays at its fixed point.
"""

from __future__ import annotations

import dataclasses
import math
import time
from fnmatch import fnmatch

import numpy as np
from worlds import enumerable

from certificates import cases, conclusion
from certificates.measured import ratios
from certificates.measured.ratios import STALE, Finding
from certificates.ratio_claims import CLAIMS
from rlhf_jax.functional import checks
from rlhf_jax.runs import command_line, report, run, run_config

KL_OF_MIXED = "dynamic sampling biases a KL in the loss"

REGRESSION = "DAR goes towards π_ref^α·π^(1 - α)·exp(r/β), and stays at π_ref·exp(r/αβ)"

PENALTY = "gradient regularisation adds γ/2·∇‖∇V‖² of the surrogate V"

NOT_COVERED = (
    "groups of more than two responses, several prompts in a minibatch",
    "samples more than four updates old, and ratios larger than the table shows",
    "the optimum of methods that divide by a std",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_worlds: int = 1
    """Number of worlds (policies and rewards); seeds are --seed, --seed + 1, ..."""
    only: tuple[str, ...] = ()
    """Names of certificates to check, * matches any text; empty checks all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(num_worlds=self.num_worlds)
        cases.chosen(CLAIMS, only=self.only)


def asked(name: str, options: Config) -> bool:
    """Whether `--only` selects a certificate that is not a row of the tables."""
    return not options.only or any(fnmatch(name, one) for one in options.only)


def show(findings: list[Finding], *, seed: int) -> None:
    """Prints the two tables.

    Columns of the first: the target and the method's share of it; the error on the
    sampler's policy, or for a biased method the share of the gradient orthogonal to
    ∇E[r]; the gradient left at the optimum. Columns of the second: the largest error
    against the formula; the cosine to ∇E[r] after 0, 1, 2 and 4 updates; the largest
    ratio of a token, or its inverse, after 4 updates.
    """
    report.table(
        f"On the sampler's policy, seed {seed}: pairs of responses of 1 to 4 tokens",
        ("method", "gradient of", "share", "error", "at π*", ""),
        [
            (
                finding.claim.name,
                finding.claim.target,
                "biased"
                if finding.claim.share is None
                else f"{finding.claim.share:.3g}",
                f"{finding.on_policy:.0e}",
                "" if math.isnan(finding.at_optimum) else f"{finding.at_optimum:.0e}",
                "holds" if finding.holds else "FAILS",
            )
            for finding in findings
        ],
    )
    report.table(
        f"After {', '.join(map(str, STALE))} updates, seed {seed}: cosine to ∇E[r]",
        ("method", "formula", *map(str, STALE), "ratio"),
        [
            (
                finding.claim.name,
                f"{max(stale.error for stale in finding.stale):.0e}",
                *(f"{stale.cosine:.3f}" for stale in finding.stale),
                f"{finding.stale[-1].ratio:.2f}",
            )
            for finding in findings
        ],
    )
    for finding in findings:
        if finding.claim.bias:
            print(f"{finding.claim.name} is biased by {finding.claim.bias}")


def main(options: Config) -> None:
    """Prints the tables; raises StopError if a certificate fails."""
    started = time.perf_counter()
    shown: dict[str, bool] = {}
    rows = []
    with run.Run(options, num_steps={}) as job:
        for seed in range(options.seed, options.seed + options.num_worlds):
            case = cases.draw(seed, stop_ids=enumerable.STOPS)
            count = len(enumerable.every_tokens(case.stop_ids))
            rewards = np.random.default_rng(seed).normal(size=count)
            claims = cases.chosen(CLAIMS, only=options.only)
            findings = list(ratios.certify(case, rewards, claims=claims))
            show(findings, seed=seed)
            shown |= {
                f"{finding.claim.name}, seed {seed}": finding.holds
                for finding in findings
            }
            rows += [
                {
                    "seed": seed,
                    "name": finding.claim.name,
                    "target": finding.claim.target,
                    "share": finding.claim.share,
                    "bias": finding.claim.bias,
                    "on_policy": finding.on_policy,
                    "at_optimum": None
                    if math.isnan(finding.at_optimum)
                    else finding.at_optimum,
                    "stale": [stale._asdict() for stale in finding.stale],
                }
                for finding in findings
            ]
            if asked(REGRESSION, options):
                error, still = ratios.of_regression(case, rewards)
                print(f"{REGRESSION}: within {error:.0e}, and {still:.0e}")
                small = max(error, still) < ratios.TOLERANCE
                shown[f"{REGRESSION}, seed {seed}"] = small
                rows.append(
                    {"seed": seed, "name": REGRESSION, "error": error, "still": still}
                )
            if options.only:
                continue
            beside = ratios.bias_of_mixed_groups(case, rewards)
            print(f"{KL_OF_MIXED}: {beside:.3f} of it is beside that of all groups")
            shown[f"{KL_OF_MIXED}, seed {seed}"] = beside > ratios.LEAST_BIAS
            rows.append({"seed": seed, "name": KL_OF_MIXED, "outside": beside})
            error, beside = ratios.of_gradient_penalty(case, rewards)
            print(f"{PENALTY}: within {error:.0e}; {beside:.3f} is beside that of E[r]")
            shown[f"{PENALTY}, seed {seed}"] = error < ratios.SLACK
            rows.append(
                {"seed": seed, "name": PENALTY, "error": error, "outside": beside}
            )
    conclusion.conclude(
        job.folder,
        list(shown.items()),
        not_covered=NOT_COVERED,
        figures={"findings": rows},
        started=started,
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
