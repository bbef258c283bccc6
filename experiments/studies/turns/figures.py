"""Evaluates policies of several turns on held-out rows, from their sweep.

    python experiments studies.turns.figures runs/turns/calculator

Plays 800 episodes of held-out rows with the policy of every run and with its reference,
sampled as in training. Writes figures.json and plots/learning.png into the sweep's
folder: the share of episodes that succeed, turns, score, and the KL to the reference
over the sampled tokens. For each β it also prints the rise of the share, with its 95%
interval over seeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from studies import finished
from studies.finished import Finished

from rlhf_jax.algorithms.batch import Request
from rlhf_jax.algorithms.flow import score
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import batches
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.roles.reference import frozen
from rlhf_jax.runs import command_line, folder, metrics, report
from rlhf_jax.sweeps import statistics
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.methods import grpo
from rlhf_jax.train.reading import load_start
from rlhf_jax.train.rewards import RewardPools
from rlhf_jax.train.rows import Responder

Figures = Mapping[str, float]
EPISODES = 800
BATCH = 200
MEASURED = {
    "success": "success",
    "turns": "turns",
    "score": "score",
    "kl": "KL, nats",
    "kl_k3": "by k3",
}


class Player:
    """Plays the held-out rows of a sweep, with programs that are compiled once."""

    def __init__(
        self, config: grpo.Config, *, stack: contextlib.ExitStack, batch: int
    ) -> None:
        """Reads the rows and builds the programs, without compiling them.

        Args:
          config: the config of any run of the sweep.
          stack: closes the environment's processes.
          batch: episodes per batch.
        """
        self._config, self._batch = config, batch
        meshes = Meshes.of(config)
        self._mesh = meshes.policy
        start = self._load(config.start.model)
        algorithm = config.algorithm(
            model=start.model,
            max_new_tokens=config.batch.max_new_tokens,
            stop_ids=start.stop_ids,
            **config.optimizers(),
        )
        source = config.watch.held_out
        assert source is not None  # the sweeps set --held-out
        responder = Responder(
            config,
            start=start,
            meshes=meshes,
            context=start.model.max_positions,
            stack=stack,
        )
        data = responder.read(
            source,
            pools=RewardPools(config, mesh=self._mesh, stack=stack),
            receipt=Receipts().source("--held-out", source),
        )
        self._draw = responder.episodes(data, algorithm, rows=batch, base=None)
        self._prompts = batches.prompt_batches(
            data.prompts, batch_size=batch, seed=0, pad_id=start.pad_id
        )
        self._reference_logprobs = jax.jit(
            functools.partial(
                score.reference_logprobs,
                model=algorithm.model,
                max_new_tokens=algorithm.max_new_tokens,
                temperature=algorithm.temperature,
            )
        )

    def play(self, model: str, *, reference: str, episodes: int) -> Figures:
        """Samples episodes of a policy and returns the means of MEASURED.

        An episode succeeds if its score is above 0. The KL of an episode is
        Σ (log π − log π_ref) over its sampled tokens, and kl_k3 is Σ k3 over them.

        Args:
          model: checkpoint of the policy.
          reference: checkpoint of the reference.
          episodes: least number of episodes, rounded up to whole batches.
        """
        policy = self._load(model).params
        frozen_reference = frozen.freeze(self._load(reference).params)
        assert self._draw is not None  # because there is an environment
        rows: dict[str, list[Any]] = {name: [] for name in MEASURED}
        for number in range(-(-episodes // self._batch)):
            rollout, scores = self._draw(
                policy,
                Request(
                    self._prompts[number],
                    jax.random.fold_in(jax.random.key(0), number),
                    jnp.int32(0),
                ),
            )
            ref_logprobs = self._reference_logprobs(frozen_reference, rollout=rollout)
            ratio = np.asarray(ref_logprobs - rollout.old_logprobs)
            ratio = np.where(rollout.response_mask, ratio, 0.0)
            rows["score"].append(scores.total)
            rows["success"].append(np.asarray(scores.total) > 0)
            rows["turns"].append(scores.parts["turns"])
            rows["kl"].append(-ratio.sum(-1))
            rows["kl_k3"].append((np.expm1(ratio) - ratio).sum(-1))
        return {name: float(np.concatenate(of).mean()) for name, of in rows.items()}

    def _load(self, model: str) -> Any:
        options = dataclasses.replace(self._config.start, model=model)
        start = pretrained.described(model, tokenizer=options.tokenizer)
        return load_start(options, mesh=self._mesh, start=start)


def played(
    runs: Sequence[Finished], *, episodes: int = EPISODES, batch: int = BATCH
) -> dict[str, Any]:
    """Plays all runs: {"before": {seed: figures}, "after": {β: {seed: figures}}}."""
    every: dict[Path, grpo.Config] = {}
    for run in runs:
        argv = ["--config", str(run.folder / folder.CONFIG)]
        every[run.folder] = command_line.parse(grpo.Config, description=None, argv=argv)
    before: dict[str, Figures] = {}
    after: dict[str, dict[str, Figures]] = {}
    with contextlib.ExitStack() as stack:
        player = Player(every[runs[0].folder], stack=stack, batch=batch)
        for run in runs:
            config, seed = every[run.folder], str(run.seed)
            model = config.start.model
            play = functools.partial(player.play, reference=model, episodes=episodes)
            if seed not in before:
                before[seed] = play(model)
            of_cell = after.setdefault(f"{config.kl_coef:g}", {})
            of_cell[seed] = play(str(run.folder / "model"))
    return {"before": before, "after": after}


def summarise(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Adds, for each β, the rise of success with its 95% interval over seeds.

    Args:
      measured: the result of `played`.
    """
    rises = {}
    for kl_coef, after in measured["after"].items():
        rise = [
            of["success"] - measured["before"][seed]["success"]
            for seed, of in after.items()
        ]
        estimate = statistics.estimate(rise)
        rises[kl_coef] = {
            "least": min(rise),
            "mean": estimate.mean,
            "interval": estimate.interval and list(estimate.interval),
        }
    return {**measured, "rise_of_success": rises}


def tell(figures: Mapping[str, Any]) -> None:
    """Prints the figures of `summarise` as a table."""
    after = figures["after"]
    columns = {"reference": figures["before"]} | {
        f"β = {kl_coef}": of for kl_coef, of in after.items()
    }
    report.table(
        f"Held-out rows, {EPISODES} sampled episodes: mean (range) over seeds",
        ("", *columns),
        [
            (
                line,
                *(
                    _range([seed[name] for seed in of.values()])
                    for of in columns.values()
                ),
            )
            for name, line in MEASURED.items()
        ],
    )
    for kl_coef, rise in figures["rise_of_success"].items():
        interval = rise["interval"]
        shown = interval and f" (95% interval {interval[0]:.2f} to {interval[1]:.2f})"
        print(
            f"β = {kl_coef}: success rises by {rise['mean']:.2f}{shown or ''}, "
            f"at least {rise['least']:.2f} in a seed"
        )


def _range(values: Sequence[float]) -> str:
    shown = [float(np.mean(values)), min(values), max(values)]
    mean, least, most = (round(number, 2) + 0.0 for number in shown)  # no -0.00
    return f"{mean:.2f} ({least:.2f} to {most:.2f})"


def draw(runs: Sequence[Finished]) -> Figure:
    """Plots score, turns and KL along training: a line per run, a colour per β."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = {
        "objective/scores": "score",
        "response/turns": "turns",
        "objective/kl": "KL [nats per episode]",
    }
    cells = list(dict.fromkeys(run.cell for run in runs))
    for axis, (name, label) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for run in runs:
            values = [row[name] for row in metrics.read(run.folder / "metrics.jsonl")]
            number = cells.index(run.cell)
            axis.plot(
                _smooth(values),
                color=f"C{number}",
                linewidth=0.9,
                label=run.cell.replace("kl_coef=", "β = ")
                if run.seed == runs[0].seed
                else None,
            )
        axis.set_xlabel("iteration")
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize="small")
    return figure


def _smooth(values: Sequence[float], *, width: int = 5) -> list[float]:
    """Moving averages over `width` values, fewer at the start."""
    return [
        float(np.mean(values[max(0, n + 1 - width) : n + 1]))
        for n in range(len(values))
    ]


def main(options: finished.Options) -> None:
    """Plays the episodes of a sweep, and prints and plots the figures."""
    runs = finished.complete(finished.runs_of(options.sweep))
    finished.check_apart(runs, option="kl_coef")
    figures = summarise(played(runs))
    tell(figures)
    (options.sweep / "plots").mkdir(exist_ok=True)
    draw(runs).savefig(options.sweep / "plots" / "learning.png", dpi=110)
    folder.write_json(options.sweep / "figures.json", figures)
    print(f"figures.json and plots are in {options.sweep}")


if __name__ == "__main__":
    finished.command(main, description=__doc__)
