"""Certificates of corrections: TIS, masked importance sampling, rejection, unbiased k3.

    python experiments certificates.certify_corrections --out runs/certify_corrections

The world has 4 tokens, one of which ends a response; all 121 responses of 1 to 4 tokens
and all their pairs are enumerated. The samples stay those of the first policy while the
policy takes updates along ∇E[r] (`corrections/gradients.py`). The command prints one
table with a row per correction, and the exit status is 1 if one fails:

target   After 0, 1, 2 and 4 updates the expected gradient, measured through the
         log-probs, the experience and the loss of a run, is that of the named objective
         within 1e-5. Where the objective is not E[r], its bias is named and detected.
cosine   Cosine of this gradient to ∇E[r] of the current policy; for a KL in the loss,
         to the gradient of the reverse KL at the sampler's prefixes.
optimum  At π* ∝ π_ref exp(r/β), with the KL in the reward, the gradient is 0 for
         samples of any policy.
cut      Share of the tokens of the 121 responses whose weight a bound has cut.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
from worlds import enumerable

from certificates import cases, conclusion
from certificates.corrections import gradients
from certificates.corrections.claims import CLAIMS
from certificates.corrections.gradients import Finding
from certificates.measured.ratios import STALE
from rlhf_jax.functional import checks
from rlhf_jax.runs import command_line, report, run, run_config

NOT_COVERED = (
    "groups of more than two responses, several prompts in a minibatch",
    "samples more than four updates old, and samplers that lie about their log-probs",
    "PPO with a critic; bounds other than those of the table",
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


def show(findings: list[Finding], *, seed: int) -> None:
    """Prints the table and the reason of each bias.

    Columns: the objective; the largest error against its gradient; the gradient left at
    the optimum; the share of tokens cut after the last update; the cosine after each
    number of updates.
    """
    updates = ", ".join(map(str, STALE))
    report.table(
        f"Samples {updates} updates old, seed {seed}: cosine to the goal's gradient",
        ("correction", "gradient of", "error", "at π*", "cut", *map(str, STALE), ""),
        [
            (
                finding.claim.name,
                finding.claim.target,
                f"{max(stale.error for stale in finding.stale):.0e}",
                f"{finding.at_optimum:.0e}",
                f"{finding.cut:.2f}",
                *(f"{stale.cosine:.3f}" for stale in finding.stale),
                "holds" if finding.holds else "FAILS",
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
            findings = list(gradients.certify(case, rewards, claims=claims))
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
                    "bias": finding.claim.bias,
                    "at_optimum": finding.at_optimum,
                    "cut": finding.cut,
                    "stale": [stale._asdict() for stale in finding.stale],
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
