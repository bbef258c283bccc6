"""A JAX profiler trace of a few steps, written to RUN/profile.

    step            3    4 │  5    6    7  │ 8          --profile 5:8
    devices       behind   │    behind     │ behind
                         waits           waits

The run waits for its devices only at the two boundaries.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rlhf_jax.devices import processes, program_cache
from rlhf_jax.runs import parsing, write_errors
from rlhf_jax.runs.folder import write_text
from rlhf_jax.runs.profile import Masks, Window

FOLDER, WINDOW, TRACES = "profile", "window.json", "*.xplane.pb"


class Text(NamedTuple):
    """Lengths of one text that a step read, tokens."""

    prompt: int
    response: int
    observed: int = 0  # other tokens after the response's first, such as observations


class Profiled(NamedTuple):
    """Facts about a profiled window that its trace does not contain."""

    stage: str
    first: int
    end: int
    seconds: float  # between the two boundaries
    trace: str  # the .xplane.pb, below the run folder
    texts: list[list[Text]]  # of each step
    compiled: int  # programs compiled within the window
    device: str  # JAX's `device_kind`
    devices: int  # number over all processes, idle devices included
    processes: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.end - self.first


class Profiler:
    """Traces the steps of a window, on the devices of the first process."""

    def __init__(
        self,
        run_folder: Path,
        *,
        stage: str,
        window: Window,
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Stores the window of a stage.

        `paused` encloses work outside the time of steps, as `metrics.Recorder.paused`.
        """
        self._folder, self._stage, self._window = run_folder, stage, window
        self._paused = paused
        self._since: float | None = None
        self._first = 0
        self._masks: list[list[Masks]] = []
        self._earlier: set[Path] = set()
        self._compiled_before = program_cache.Counts()
        self._step = contextlib.ExitStack()  # the annotation of a step under way

    def begin_stage(self, stage: str, start: int) -> None:
        """Begins at step `start`; warns if an untraced window lies before it."""
        self.begin_step(stage, start)
        window = self._window
        if stage != self._stage or start < window.end:
            return
        if processes.is_first() and read(self._folder, window=window) is None:
            print(
                f"warning: --profile {window.first}:{window.end}: {stage} goes on at "
                f"step {start}, after these steps; nothing is traced",
                file=sys.stderr,
            )

    def begin_step(self, stage: str, step: int) -> None:
        """Starts the trace if the next step, `step`, is in the window."""
        if stage != self._stage or not self._window.first <= step < self._window.end:
            return
        if self._since is None:
            self._start(step)
        if processes.is_first():
            annotation = jax.profiler.StepTraceAnnotation("step", step_num=step)
            self._step.enter_context(annotation)

    def end_step(self, step: int, texts: Iterable[Masks]) -> None:
        """Stores a step's masks, and ends the trace after the window's last step."""
        if self._since is None:
            return
        self._masks.append(list(texts))
        self._step.close()
        if step + 1 == self._window.end:
            jax.block_until_ready(jax.live_arrays())
            seconds, self._since = time.perf_counter() - self._since, None
            with self._paused():
                self._write(seconds)

    def close(self) -> None:
        """Discards an unfinished trace, as after a stop or an error."""
        self._step.close()
        if self._since is not None and processes.is_first():
            folder = self._folder / FOLDER
            with write_errors.writing(folder):
                jax.profiler.stop_trace()
                if not (folder / WINDOW).exists():
                    shutil.rmtree(folder)
                else:  # keep the trace of an earlier window
                    for path in set(folder.rglob(TRACES)) - self._earlier:
                        shutil.rmtree(path.parent)
        self._since, self._masks = None, []

    def _start(self, step: int) -> None:
        # Waits outside `paused`: this time belongs to earlier steps.
        jax.block_until_ready(jax.live_arrays())
        if processes.is_first():
            options = jax.profiler.ProfileOptions()
            # Calls of Python functions would fill most of the trace and slow the run.
            options.python_tracer_level = 0
            folder = self._folder / FOLDER
            self._earlier = set(folder.rglob(TRACES))
            with self._paused(), write_errors.writing(folder):
                jax.profiler.start_trace(folder, profiler_options=options)
        self._compiled_before = program_cache.compiled_so_far()
        self._first, self._since = step, time.perf_counter()

    def _write(self, seconds: float) -> None:
        compiled = program_cache.compiled_since(self._compiled_before)
        texts, self._masks = [_lengths(mask) for mask in self._masks], []
        if not processes.is_first():
            return
        folder = self._folder / FOLDER
        with write_errors.writing(folder):
            jax.profiler.stop_trace()
        # Folders are named by their time, so the last one is this trace.
        newest = max(folder.rglob(TRACES), key=lambda path: path.parent.name)
        profiled = Profiled(
            stage=self._stage,
            first=self._first,
            end=self._window.end,
            seconds=seconds,
            trace=newest.relative_to(self._folder).as_posix(),
            texts=texts,
            compiled=sum(compiled.values()),
            device=jax.devices()[0].device_kind,
            devices=jax.device_count(),
            processes=jax.process_count(),
        )
        write_text(folder / WINDOW, json.dumps(profiled._asdict()))


def read(run_folder: Path, *, window: Window | None) -> Profiled | None:
    """Reads the newest profile of a run; None if it has none within the window.

    The profile may cover a part of the window, as after a resume.
    """
    path = run_folder / FOLDER / WINDOW
    if window is None or not path.exists():
        return None
    expected, advice = "the steps of a profile", "remove the folder of the profile"
    fields = parsing.read_object(path, expected=expected, advice=advice)
    fields["texts"] = [[Text(*numbers) for numbers in step] for step in fields["texts"]]
    profiled = Profiled(**fields)
    within = window.first <= profiled.first and profiled.end <= window.end
    return profiled if within else None


def _lengths(masks: Sequence[Masks]) -> list[Text]:
    texts: list[Text] = []
    for which, responses in processes.whole(list(masks)):
        segments = np.asarray(which).astype(np.int32)
        for row, answered in zip(segments, np.asarray(responses), strict=True):
            began = answered & (row > 0)
            for segment in np.unique(row[row > 0]):
                trained = began[row == segment]
                response, size = int(trained.sum()), trained.size
                prompt = int(trained.argmax()) if response else size
                texts.append(Text(prompt, response, size - prompt - response))
    return texts
