"""A JAX profiler trace of a few steps, written to RUN/profile.

    step            3    4 │  5    6    7  │ 8          --profile 5:8
    devices       behind   │    behind     │ behind
                         waits           waits

The run waits for its devices at the two boundaries alone.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax.devices import processes
from rlhf_jax.runs import write_errors
from rlhf_jax.runs.folder import write_text
from rlhf_jax.runs.profile.window import Window

Array = jax.Array
Masks = tuple[Array, Array]  # segments or mask [B, S], response tokens [B, S]
FOLDER, WINDOW = "profile", "window.json"


class Text(NamedTuple):
    """Lengths of one text that a step read, tokens."""

    prompt: int
    response: int


class Profiled(NamedTuple):
    """What is known of a profiled window beside its trace."""

    stage: str
    first: int
    end: int
    seconds: float  # between the two boundaries
    trace: str  # the .xplane.pb, below the run folder
    texts: list[list[Text]]  # of each step

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.end - self.first


class Profiler:
    """Traces the steps of a window; without one it does nothing.

    Of several processes the first traces, its own devices.
    """

    def __init__(self, run_folder: Path, *, stage: str, window: Window | None) -> None:
        """Takes the run's folder and the stage whose steps are meant."""
        self._folder, self._stage, self._window = run_folder, stage, window
        self._since: float | None = None
        self._first = 0
        self._masks: list[list[Masks]] = []
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def begin_step(self, stage: str, step: int) -> None:
        """Starts the trace where `step`, the next one, is in the window."""
        if self._window is None or stage != self._stage:
            return
        if not self._window.first <= step < self._window.end:
            return
        if self._since is None:
            self._start(step)
        if processes.is_first():
            self._annotation = jax.profiler.StepTraceAnnotation("step", step_num=step)
            self._annotation.__enter__()

    def end_step(self, step: int, texts: Iterable[Masks]) -> None:
        """Notes what the step read, and ends the trace after the window's last one."""
        if self._window is None or self._since is None:
            return
        self._masks.append(list(texts))
        self._leave_step()
        if step + 1 == self._window.end:
            self._stop()

    def close(self) -> None:
        """Gives up a trace that is under way, as a stop or an error does."""
        self._leave_step()
        if self._since is not None and processes.is_first():
            jax.profiler.stop_trace()
        self._since, self._masks = None, []

    def _start(self, step: int) -> None:
        jax.block_until_ready(jax.live_arrays())
        if processes.is_first():
            options = jax.profiler.ProfileOptions()
            # Python's own calls would be most of the trace, and slow the run.
            options.python_tracer_level = 0
            folder = self._folder / FOLDER
            with write_errors.writing(folder):
                jax.profiler.start_trace(folder, profiler_options=options)
        self._first, self._since = step, time.perf_counter()

    def _stop(self) -> None:
        assert self._window is not None
        assert self._since is not None
        jax.block_until_ready(jax.live_arrays())
        seconds = time.perf_counter() - self._since
        self._since = None
        texts, self._masks = [_lengths(each) for each in self._masks], []
        if not processes.is_first():
            return
        folder = self._folder / FOLDER
        with write_errors.writing(folder):
            jax.profiler.stop_trace()
        # Named by their time, of which the newest is this one.
        newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.parent.name)
        profiled = Profiled(
            stage=self._stage,
            first=self._first,
            end=self._window.end,
            seconds=seconds,
            trace=newest.relative_to(self._folder).as_posix(),
            texts=texts,
        )
        with write_errors.writing(folder / WINDOW):
            write_text(folder / WINDOW, json.dumps(profiled._asdict()))

    def _leave_step(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None


def read(run_folder: Path) -> Profiled | None:
    """The newest profile of a run; None where it has none."""
    path = run_folder / FOLDER / WINDOW
    if not path.exists():
        return None
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    fields["texts"] = [[Text(*each) for each in step] for step in fields["texts"]]
    return Profiled(**fields)


def _lengths(masks: Sequence[Masks]) -> list[Text]:
    """The lengths of all texts, row by row."""
    texts: list[Text] = []
    for which, responses in processes.whole(list(masks)):
        segments = np.asarray(which).astype(np.int32)
        for row, answered in zip(segments, np.asarray(responses), strict=True):
            tokens, trained = Counter(row[row > 0]), Counter(row[answered & (row > 0)])
            texts += [
                Text(int(count - trained[segment]), int(trained[segment]))
                for segment, count in sorted(tokens.items())
            ]
    return texts
