"""Progress of reading is shown where reading is slow, and no item is lost."""

import io

import pytest
from rich.console import Console

from rlhf_jax.runs import progress


class Clock:
    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def monotonic(self):
        self.now += self.seconds
        return self.now


def shown(monkeypatch, *, terminal, seconds, count=10):
    """The output for items that take some seconds each."""
    monkeypatch.setattr(progress, "time", Clock(seconds))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    items = progress.track(range(count), "rows [read]", total=count, console=console)
    assert [*items] == [*range(count)]
    return console.file.getvalue()


def test_a_terminal_has_a_bar_of_what_takes_long(monkeypatch):
    text = shown(monkeypatch, terminal=True, seconds=0.4)
    assert "rows [read]" in text
    assert "10/10" in text
    assert shown(monkeypatch, terminal=True, seconds=0.09) == ""


def test_elsewhere_there_is_a_line_from_time_to_time(monkeypatch):
    text = shown(monkeypatch, terminal=False, seconds=4.0)
    assert text.splitlines() == [f"rows [read]: {n} of 10" for n in (3, 6, 9)]
    assert shown(monkeypatch, terminal=False, seconds=0.9) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_it_may_be_hidden(monkeypatch, terminal):
    with progress.hidden(True):
        assert shown(monkeypatch, terminal=terminal, seconds=60.0) == ""
    with progress.hidden(False):
        assert shown(monkeypatch, terminal=terminal, seconds=60.0) != ""


def test_batches_are_slices_and_count_items(monkeypatch):
    monkeypatch.setattr(progress, "time", Clock(11.0))
    console = Console(file=io.StringIO(), force_terminal=False)
    monkeypatch.setattr(progress, "BATCH", 3)
    slices = progress.batches("abcdefg", "letters", console=console)
    assert [*slices] == ["abc", "def", "g"]
    lines = console.file.getvalue().splitlines()
    assert lines == [f"letters: {n} of 7" for n in (3, 6, 7)]
    assert [*progress.batches([], "nothing")] == []


def test_a_consumer_that_stops_leaves_no_bar_behind(monkeypatch):
    monkeypatch.setattr(progress, "time", Clock(2.0))
    console = Console(file=io.StringIO(), force_terminal=True)
    items = progress.track(range(9), "rows", total=9, console=console)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    items.close()
    with console.status("another display"):  # rich would refuse a second one
        pass
