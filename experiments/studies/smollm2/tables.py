"""Before and after of a sweep with verifiable rewards: pass@k, format, arithmetic, KL.

    python experiments studies.smollm2.tables runs/verified/sums_sweep

Prints two Markdown tables of the measures of --held-out: the values of each cell, and
their changes seed by seed. They have means over seeds and, from two seeds on, 95%
intervals, whose width is 0 if all seeds have the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.sweeps import statistics
from studies import finished

MEASURES = {  # {title: name in summary.json}
    "pass@1": "held_out_reward/correct",
    "pass@8": "held_out_pass_at_k_reward/correct",
    "greedy, correct": "held_out_greedy_reward/correct",
    "in the asked form": "held_out_reward/format",
    "right number in any form": "held_out_reward/arithmetic",
    "KL to the reference [nats per response]": "held_out_kl",
    "length [tokens]": "held_out_length",
}
WHEN = ("before", "after")
SAMPLES = 8  # --held-out-samples, for pass@8
Summaries = Mapping[int, Mapping[str, Any]]  # by seed


def cells_of(runs: Sequence[finished.Finished]) -> Mapping[str, Summaries]:
    """The summaries of every cell, in the order of the sweep.

    Raises:
      InputError: a run was not evaluated as this study requires.
    """
    cells: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        names = [f"{key}_{when}" for key in MEASURES.values() for when in WHEN]
        missing = [name for name in names if name not in run.summary]
        samples = run.config.get("watch", {}).get("held_out_samples")
        if missing or samples != SAMPLES:
            got = f"none of {missing[0]}" if missing else f"{samples} samples"
            raise InputError(
                f"{run.folder}: expected a run with --held-out-samples {SAMPLES} and "
                f"the rewards correct, format and arithmetic, got {got}; give the "
                f"--out of a sweep of this study"
            )
        cells.setdefault(run.cell, {})[run.seed] = run.summary
    return cells


def cell(values: Sequence[float], *, signed: bool = False) -> str:
    """A mean and, from two values on, its 95% interval, as text."""
    estimate = statistics.estimate(values)
    sign = "+" if signed else ""
    mean = f"{estimate.mean:{sign}.2f}"
    if estimate.interval is not None:
        low, high = estimate.interval
        mean = f"{mean} ({low:{sign}.2f} to {high:{sign}.2f})"
    return mean.replace("-", "−")


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values_table(cells: Mapping[str, Summaries]) -> str:
    """The table of values; "before" is the model from which all cells start."""
    [first, *_] = cells.values()
    rows = [
        [
            name,
            cell([summary[f"{key}_before"] for summary in first.values()]),
            *(
                cell([summary[f"{key}_after"] for summary in of_seeds.values()])
                for of_seeds in cells.values()
            ),
        ]
        for name, key in MEASURES.items()
    ]
    return markdown(["", "before", *cells], rows)


def changes_table(cells: Mapping[str, Summaries]) -> str:
    """The table of changes, after minus before, seed by seed."""
    rows = [
        [
            name,
            *(
                cell(
                    [s[f"{key}_after"] - s[f"{key}_before"] for s in of_seeds.values()],
                    signed=True,
                )
                for of_seeds in cells.values()
            ),
        ]
        for name, key in MEASURES.items()
    ]
    return markdown(["change", *cells], rows)


def main(options: finished.Options) -> None:
    """Prints the tables of a sweep."""
    cells = cells_of(finished.complete(finished.runs_of(options.sweep)))
    [first, *_] = cells.values()
    seeds = ", ".join(map(str, first))
    print(f"Means (95% intervals) over seeds {seeds}.\n")
    print(values_table(cells), changes_table(cells), sep="\n\n")


if __name__ == "__main__":
    finished.command(main, description=__doc__)
