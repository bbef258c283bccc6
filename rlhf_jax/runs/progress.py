"""Progress of what takes long before a run begins: reading and encoding its rows.

A terminal shows a bar on stderr once the work has taken a second, and elsewhere there
is a line every ten seconds; work that is done before is not mentioned.

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
BATCH = 4096  # rows at once, for what takes many; bounds the memory it needs

_hidden: contextvars.ContextVar[bool] = contextvars.ContextVar("hidden", default=False)


@contextlib.contextmanager
def hidden(hide: bool = True) -> Iterator[None]:
    """Within it nothing is shown (--no-progress)."""
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
    """The items, with progress as they are consumed.

    Args:
      what: is done with them, for a person.
      total: of all amounts.
      amount: of an item; None is 1.
      console: where it is shown; None is stderr.
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
    """Slices of at most `size` items, with the progress of `track`; none of none."""
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
