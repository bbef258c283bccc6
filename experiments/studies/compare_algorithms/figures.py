"""Tables and the plot of a comparison of algorithms, from its sweep.

    python experiments studies.compare_algorithms.figures runs/compare

Writes figures.json and plots/comparison.png into the sweep's folder: gold and score
against √KL, net objectives, and the lead in gold over best-of-n at the same KL.
"""

from __future__ import annotations

from rlhf_jax.runs import folder
from studies import finished
from studies.compare_algorithms import comparison


def main(options: finished.Options) -> None:
    """Prints and plots the figures of a sweep of algorithms."""
    runs = finished.complete(finished.runs_of(options.sweep))
    finished.check_apart(runs, option="algorithm")
    before, after, points = [], [], []
    for run in runs:
        own = {"algorithm": run.config["algorithm"], "seed": run.seed}
        after += [
            own | row
            for name, row in run.summary.items()
            if name == "policy" or name.startswith("best of ")
        ]
        points += [own | row for row in run.points()]
        if run.cell == runs[0].cell:
            before.append({"seed": run.seed} | run.summary["reference"])
    kl_coef = runs[0].config["kl_coef"]
    figures = comparison.summarise(points, before, after, kl_coef=kl_coef)
    comparison.tell(figures, kl_coef=kl_coef)
    comparison.plot(options.sweep, points, before, after)
    folder.write_json(options.sweep / "figures.json", figures | {"kl_coef": kl_coef})
    print(f"figures.json and plots are in {options.sweep}")


if __name__ == "__main__":
    finished.command(main, description=__doc__)
