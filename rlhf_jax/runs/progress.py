"""Progress of a run's stages, and of long work before it, such as encoding its rows.

`Progress` shows the steps of a run, and `track` other work: a terminal shows a bar on
stderr once it has taken a second. Other outputs get a line every ten seconds. Shorter
work shows nothing.

    train.jsonl: rows as tokens ━━━━━━━━━━━━ 122880/200000 0:00:07
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from rich import progress
from rich.console import Console
from rich.text import Text

from rlhf_jax.runs import alarms, report
from rlhf_jax.runs.alarms import Alarm
from rlhf_jax.runs.metrics import Row

Item = TypeVar("Item")

SECONDS_BEFORE_A_BAR = 1.0
SECONDS_BETWEEN_LINES = 10.0
BATCH = 4096  # rows processed at once, which bounds the memory needed
SHOWN = (
    *("loss/language_model", "loss/pairwise", "pairwise/accuracy", "loss/dpo"),
    *("dpo/accuracy", "dpo/margin", "objective/scores", "objective/kl"),
    *("objective/kl_coef", "response/length", "response/taught"),
)

_hidden: contextvars.ContextVar[bool] = contextvars.ContextVar("hidden", default=False)


class Progress:
    """A sink of `metrics.Recorder`: one bar per stage, the time left, and main metrics.

    An output that is not a terminal gets a line every few seconds, and one at the end
    of each stage. An alarm is printed in full when it begins, and named while active.
    """

    def __init__(
        self, num_steps: Mapping[str, int], *, console: Console | None = None
    ) -> None:
        """Takes {stage: number of steps}."""
        self._num_steps = num_steps
        self._console = console or Console()
        self._bars = progress.Progress(
            *_columns(),
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
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Prints alarms that begin at this step, and shows its values on the bar."""
        for alarm in alarms.begun(active, step=step):
            line = f"ALARM {stage} step {step}: {alarm.name}: {alarm.message}"
            self._console.print(Text(line, style="bold red"), soft_wrap=True)
        shown = [
            f"{name.rpartition('/')[-1]} {report.cell(row[name], of=name)}"
            for name in SHOWN
            if name in row
        ]
        if active:
            shown.append(f"ALARM {' '.join(alarm.name for alarm in active)}")
        numbers = "  ".join(shown)
        self._bars.update(self._bar, completed=step + 1, numbers=numbers)
        now, ended = time.monotonic(), step + 1 == self._num_steps[stage]
        due = ended or now - self._last_line >= SECONDS_BETWEEN_LINES
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


@contextlib.contextmanager
def hidden(hide: bool) -> Iterator[None]:
    """Shows no progress inside (--no-progress)."""
    before = _hidden.set(hide)
    try:
        yield
    finally:
        _hidden.reset(before)


def track(
    items: Iterable[Item],
    what: str,
    *,
    total: int,
    amount: Callable[[Item], int] | None = None,
    console: Console | None = None,
) -> Iterator[Item]:
    """Yields the items, and shows progress as they are consumed.

    Args:
      what: description of the work, such as "train.jsonl: rows as tokens".
      total: sum of the amounts of all items.
      amount: item -> its amount of work; None counts 1.
      console: where progress is shown; None is stderr.
    """
    if _hidden.get():
        yield from items
        return
    began = last = time.monotonic()
    done = 0
    with contextlib.ExitStack() as stack:
        shown: tuple[progress.Progress, progress.TaskID] | None = None
        for item in items:
            yield item
            done += 1 if amount is None else amount(item)
            now = time.monotonic()
            if shown is not None:
                shown[0].update(shown[1], completed=done)
                continue
            if now - began <= SECONDS_BEFORE_A_BAR:
                continue
            console = console or Console(stderr=True)
            if console.is_terminal:
                bars = progress.Progress(*_columns(), console=console, transient=True)
                stack.enter_context(bars)
                shown = bars, bars.add_task(what, total=total, completed=done)
            elif now - last > SECONDS_BETWEEN_LINES:
                last = now
                console.out(f"{what}: {done} of {total}", highlight=False)


def batches(
    items: Sequence[Item],
    what: str,
    *,
    console: Console | None = None,
) -> Iterator[Sequence[Item]]:
    """Yields slices of at most BATCH items, and shows progress as `track` does."""
    slices = (items[start : start + BATCH] for start in range(0, len(items), BATCH))
    return track(slices, what, total=len(items), amount=len, console=console)


def _columns() -> tuple[progress.ProgressColumn, ...]:
    return (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=12),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
