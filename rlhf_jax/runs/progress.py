"""Progress of long work before a run begins, such as reading and encoding its rows.

A terminal shows a bar on stderr once the work has taken a second. Other outputs get a
line every ten seconds. Shorter work shows nothing.

    train.jsonl: rows as tokens ━━━━━━━━━━━━ 122880/200000 0:00:07
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich import progress
from rich.console import Console

Item = TypeVar("Item")

SECONDS_BEFORE_A_BAR = 1.0
SECONDS_BETWEEN_LINES = 10.0
BATCH = 4096  # rows processed at once, which bounds the memory needed

_hidden: contextvars.ContextVar[bool] = contextvars.ContextVar("hidden", default=False)


@contextlib.contextmanager
def hidden(hide: bool = True) -> Iterator[None]:
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
                bars = stack.enter_context(_bars(console))
                shown = bars, bars.add_task(what, total=total, completed=done)
            elif now - last > SECONDS_BETWEEN_LINES:
                last = now
                console.out(f"{what}: {done} of {total}", highlight=False)


def batches(
    items: Sequence[Item],
    what: str,
    *,
    size: int = BATCH,
    console: Console | None = None,
) -> Iterator[Sequence[Item]]:
    """Yields slices of at most `size` items, and shows progress as `track` does."""
    slices = (items[start : start + size] for start in range(0, len(items), size))
    return track(slices, what, total=len(items), amount=len, console=console)


def _bars(console: Console) -> progress.Progress:
    columns: list[Any] = [
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=12),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    ]
    return progress.Progress(*columns, console=console, transient=True)
