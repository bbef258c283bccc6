"""Tables and plots of the β frontier, from its sweep.

    python experiments studies.kl_frontier.figures runs/frontier

Writes figures.json, plots/frontier.png and plots/objective.png into the sweep's folder:
the fit of gold against √KL (Gao et al. 2022), net objectives, and the number of seeds
with each of three failures.
"""

from __future__ import annotations

from rlhf_jax.runs import folder
from studies import finished
from studies.kl_frontier import overoptimisation


def main(options: finished.Options) -> None:
    """Prints and plots the figures of a sweep of β."""
    runs = finished.complete(finished.runs_of(options.sweep))
    finished.check_apart(runs, option="kl_coef")
    before, after, points = [], [], []
    for run in runs:
        own = {"seed": run.seed, "kl_coef": run.config["kl_coef"]}
        measured = {
            name: run.summary[name] | {"score": run.summary[name]["unshaped_score"]}
            for name in ("reference", "policy")
        }
        after.append(own | measured["policy"])
        points += [own | row for row in run.points()]
        if run.cell == runs[0].cell:
            before.append({"seed": run.seed} | measured["reference"])
    figures = overoptimisation.summarise(points, before, after)
    overoptimisation.tell(figures)
    overoptimisation.plots(options.sweep, [*points, *after], figures)
    folder.write_json(options.sweep / "figures.json", figures)
    print(f"figures.json and plots are in {options.sweep}")


if __name__ == "__main__":
    finished.command(main, description=__doc__)
