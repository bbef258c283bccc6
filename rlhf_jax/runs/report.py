"""What a person reads of a run: progress, tables and plots."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_jax.devices import processes
from rlhf_jax.models import leaves
from rlhf_jax.runs import alarms, metrics, write_errors
from rlhf_jax.runs.alarms import Alarm
from rlhf_jax.runs.folder import RunConfig, to_json

PyTree = Any
SHOWN = (
    "loss/language_model",
    "loss/pairwise",
    "pairwise/accuracy",
    "loss/dpo",
    "dpo/accuracy",
    "dpo/margin",
    "objective/scores",
    "objective/kl",
    "objective/kl_coef",
    "response/length",
)


PLOTS: dict[str, dict[str, dict[str, str]]] = {
    "language_model": {"loss\n[nats per token]": {"loss/language_model": "loss"}},
    "reward_model": {
        "loss\n[nats per pair]": {"loss/pairwise": "loss"},
        "accuracy\n[share of pairs]": {"pairwise/accuracy": "accuracy"},
    },
    "dpo": {
        "loss\n[a pair]": {"loss/dpo": "loss"},
        "accuracy\n[share of pairs]": {"dpo/accuracy": "accuracy"},
        "implicit reward\n[reward units]": {
            "dpo/chosen_reward": "chosen",
            "dpo/rejected_reward": "rejected",
        },
        "log-probability\n[nats per response]": {
            "dpo/chosen_logprob": "chosen",
            "dpo/rejected_logprob": "rejected",
        },
    },
    "reward": {
        "reward\n[reward units per response]": {
            "objective/scores": "score",
            "objective/rlhf_reward": "score minus KL penalty",
        },
        "held-out judge\n[its own units]": {"judge/score": "judge"},
    },
    "kl": {
        "KL to the reference\n[nats per response]": {
            "objective/kl": "k1",
            "objective/kl_k3": "k3",
        },
        "KL coefficient\n[reward units per nat]": {"objective/kl_coef": "coefficient"},
    },
    "entropy": {"entropy\n[nats per token]": {"objective/entropy": "policy"}},
    "drift": {
        "weight drift\n[share of the reference]": {
            "drift/relative": "Σ‖Δ‖ / Σ‖ref‖",
            "drift/global_norm": "‖Δ‖ / ‖ref‖",
        },
    },
    "perplexity": {
        "log perplexity\n[nats per token]": {
            "objective/ref_nll": "responses, under the reference",
            "eval/held_out_nll": "held-out text, under the policy",
            "eval/out_of_domain_nll": "out-of-domain text, under the policy",
        },
    },
    "losses": {
        "policy loss\n[reward units]": {"loss/policy": "policy"},
        "value loss\n[reward units²]": {"loss/value": "value"},
    },
    "length": {
        "response length\n[tokens]": {"response/length": "length"},
        "share of responses": {
            "response/eos_fraction": "ended by EOS",
            "response/distinct_fraction": "distinct",
        },
    },
}
"""{figure: {y label of a panel: {metric: label of its line}}}"""


class Progress:
    """A sink of `metrics.Recorder`: a bar a stage, time left, the numbers that matter.

    Where the output is not a terminal: a line every few seconds, and one at the end of
    each stage. An alarm is a line of its own when it begins, and a name while active.
    """

    def __init__(
        self,
        num_steps: Mapping[str, int],
        *,
        shown: Sequence[str] = SHOWN,
        seconds_between_lines: float = 10.0,
        console: Console | None = None,
    ) -> None:
        """Takes each stage's number of steps, and the metrics to show of its rows."""
        self._num_steps = num_steps
        self._shown = shown
        self._between = seconds_between_lines
        self._console = console or Console()
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=12),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[numbers]}", markup=False),
            console=self._console,
            speed_estimate_period=600.0,
        )

    def begin(self, stage: str, step: int) -> None:
        """Starts the stage's bar at `step`."""
        if self._console.is_terminal:
            self._bars.start()
        self._bar = self._bars.add_task(
            stage, total=self._num_steps[stage], completed=step, numbers=""
        )
        self._last_line = -math.inf

    def write(
        self,
        stage: str,
        step: int,
        row: metrics.Row,
        active: Sequence[Alarm] = (),
    ) -> None:
        """Prints the alarms that have just begun, and the step's values on the bar."""
        for alarm in alarms.begun(active, step=step):
            line = f"ALARM {stage} step {step}: {alarm.name}: {alarm.message}"
            self._console.print(Text(line, style="bold red"), soft_wrap=True)
        shown = [
            f"{name.rpartition('/')[-1]} {_cell(row[name])}"
            for name in self._shown
            if name in row
        ]
        if active:
            shown.append(f"ALARM {' '.join(alarm.name for alarm in active)}")
        numbers = "  ".join(shown)
        self._bars.update(self._bar, completed=step + 1, numbers=numbers)
        now, ended = time.monotonic(), step + 1 == self._num_steps[stage]
        due = ended or now - self._last_line >= self._between
        if due and not self._console.is_terminal:
            self._last_line = now
            left = self._bars.tasks[self._bar].time_remaining
            wait = f"  {timedelta(seconds=left)} left" if left else ""
            count = f"{step + 1}/{self._num_steps[stage]}"
            self._console.out(f"{stage} {count}{wait}  {numbers}", highlight=False)

    def close(self) -> None:
        """Stops the live display."""
        if self._console.is_terminal:
            self._bars.stop()


def sinks(config: RunConfig, *, num_steps: Mapping[str, int]) -> list[metrics.Sink]:
    """The sinks that a run asks for, for `metrics.Recorder`; makes those on disk.

    `num_steps` holds each stage's number of steps, in their order. Of several processes
    the first has them.
    """
    chosen: list[metrics.Sink] = []
    if not processes.is_first():
        return chosen
    if config.progress:
        chosen.append(Progress(num_steps))
    if config.tensorboard:
        chosen.append(metrics.TensorBoard(config.out))
    if config.wandb:
        chosen.append(metrics.Wandb(config.out, config=to_json(config)))
    return chosen


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows on stderr what is being waited for, and afterwards how long it took."""
    console, began = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status(Text(what)):
            yield
    else:
        yield
    seconds = time.monotonic() - began
    console.out(f"{what}: {seconds:.0f} s", highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows of texts (left) and numbers (right, four digits); None is a dash."""
    rows = list(rows)
    grid = Table(title=Text(title), title_justify="left")
    for number, column in enumerate(columns):
        texts = all(isinstance(row[number], str) for row in rows)
        side = "left" if texts else "right"
        grid.add_column(Text(column), justify=side, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(_cell(value)) for value in row))
    Console().print(grid)


def side_by_side(
    samples: Sequence[Mapping[str, str]], *, title: str = "Samples"
) -> None:
    """Prints texts for reading, a sample a row and a model a column."""
    grid = Table(title=Text(title), title_justify="left", show_lines=True)
    for column in samples[0]:
        grid.add_column(Text(column), overflow="fold", ratio=1)
    for sample in samples:
        grid.add_row(*(Text(text) for text in sample.values()))
    Console().print(grid)


def model_table(roles: Sequence[tuple[str, PyTree | None, bool]]) -> None:
    """Prints what each (role, params, trainable) holds, and what is trained in all.

    The sum below the table reads "124,439,808 trainable, 248,880,385 frozen". Params
    may be arrays or shapes, stored in any way: the scales of int8 take room, but are
    not counted as parameters. None is a role without parameters of its own.
    """
    counts = {True: 0, False: 0}
    rows = []
    for role, params, trainable in roles:
        whole = jax.tree.leaves(params, is_leaf=leaves.is_stored)
        count = sum(math.prod(leaf.shape) for leaf in whole)
        arrays = jax.tree.leaves(params)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
        dtypes = sorted({np.dtype(leaf.dtype).name for leaf in arrays})
        if any(isinstance(leaf, leaves.OnHost) for leaf in whole):
            dtypes.append("on the host")
        counts[trainable] += count
        rows.append(
            (
                role,
                count,
                size / 2**20,
                ", ".join(dtypes) or "none",
                "trainable" if trainable else "frozen",
            )
        )
    table("Models", ("role", "parameters", "MiB", "dtype", "status"), rows)
    Console().print(f"{counts[True]:,} trainable, {counts[False]:,} frozen")


def plots(folder: Path) -> list[Path]:
    """Draws what folder/metrics.jsonl holds, as folder/plots/*.png.

    A line per stage and metric; with many steps their running mean, over the single
    steps in a lighter colour. Steps that were not measured are gaps.

    Returns:
      The figures drawn: those of `PLOTS` with a metric that some row holds. Of several
      processes the first draws.

    Raises:
      WriteError: they cannot be written.
    """
    if not processes.is_first():
        return []
    rows = metrics.read(folder / "metrics.jsonl")
    drawn = []
    with write_errors.writing(folder / "plots"):
        (folder / "plots").mkdir(exist_ok=True)
        for name, panels in PLOTS.items():
            names = {metric for lines in panels.values() for metric in lines}
            found = [row for row in rows if not names.isdisjoint(row)]
            if found:
                drawn.append(folder / "plots" / f"{name}.png")
                _draw(found, panels).savefig(drawn[-1], dpi=150)
    return drawn


def _draw(rows: list[dict[str, Any]], panels: dict[str, dict[str, str]]) -> Figure:
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    window = 1 + len(rows) // len(stages) // 25
    figure = Figure(figsize=(7, 1.2 + 2.3 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (label, lines) in zip(axes, panels.items(), strict=True):
        for stage, (metric, name) in itertools.product(stages, lines.items()):
            measured = [r for r in rows if r["stage"] == stage and metric in r]
            if measured:
                name = name if len(stages) == 1 else f"{stage}: {name}"
                _line(axis, measured, metric, label=name, window=window)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        handles, labels = axis.get_legend_handles_labels()
        if len(labels) > 1:
            axis.legend(handles, labels, frameon=False)
    note = f" (bold: mean of {window} steps)" if window > 1 else ""
    axes[-1].set_xlabel(f"step of {', '.join(stages)}{note}")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    return figure


def _line(
    axis: Axes, rows: list[dict[str, Any]], metric: str, *, label: str, window: int
) -> None:
    steps = [row["step"] for row in rows]
    values = np.array(
        [math.nan if row[metric] is None else float(row[metric]) for row in rows]
    )
    finite = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    counts = np.convolve(finite, kernel, mode="same")
    mean = np.where(finite, sums / np.maximum(counts, 1.0), np.nan)
    marker = "o" if len(rows) <= 25 else None
    (bold,) = axis.plot(steps, mean, label=label, marker=marker, markersize=3)
    if window > 1:
        axis.plot(steps, values, color=bold.get_color(), alpha=0.3, linewidth=0.8)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "—"
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case _:
            return f"{value:.4g}"
