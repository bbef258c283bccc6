"""The metrics of a run: one row per step, on disk before the snapshot of that step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import jax

from rlhf_jax.devices import processes, program_cache
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.runs import alarms, write_errors
from rlhf_jax.runs.alarms import Alarm
from rlhf_jax.runs.proof import sums
from rlhf_jax.runs.proof.sums import Sum
from rlhf_jax.runs.snapshots import jsonl

FILES = ("metrics", "timings", "samples", "positions")
Row = dict[str, float | None]


class AlarmError(StopError):
    """An alarm stops the run (--alarms.stop); the row that raised it is written."""


class Sink(Protocol):
    """A destination of metrics other than their file: a terminal, TensorBoard, W&B."""

    def begin(self, stage: str, step: int) -> None:
        """Called when a stage starts or resumes at `step`; does nothing by default."""

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Takes a step's values, None where not measured, and the active alarms."""

    def close(self) -> None:
        """Called when the run ends, by an error too."""


class Recorder(contextlib.AbstractContextManager[Any]):
    """The JSONL files of a run folder, shared by a pipeline's stages.

        metrics.jsonl   {"stage": "ppo", "step": 3, "objective/kl": 1.25, ...}
        timings.jsonl   {"stage": "ppo", "step": 3, "seconds": 2.1, "phases": {...}}
        samples.jsonl   {"stage": "ppo", "step": 3, ...}, any number of rows per step
        positions.jsonl {"stage": "ppo", "step": 3, "k1": [0.1, 0.0, ...], ...}

    A row of metrics.jsonl names the active alarms: "alarms": ["kl"]. A row of
    timings.jsonl counts the programs compiled by its step: "compiled": {"learn": 1}.

    Snapshot N + 1 is the first to contain step N:

        with metrics.Recorder(folder) as record:
            record.begin("ppo", step=start)
            for step in range(start, num_steps):
                with record.phase("sample"):
                    ...
                record.write(step, stats)
                if (step + 1) % snapshot_every == 0:
                    record.flush()
                    snapshots.save(step + 1, ...)

    Rows reach the disk before their snapshot, and `begin` drops later ones, so a run
    that was killed and resumed leaves the same files as one that was not. Only
    timings.jsonl contains clock times. Of several processes the first writes, and
    decides on alarms.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sinks: Sequence[Sink] = (),
        check: alarms.Check | None = None,
        stops: Callable[[str], bool] | None = None,
        accept_lost_rows: bool = False,
    ) -> None:
        """Opens the files.

        Args:
          check: decides on alarms; None raises none.
          stops: alarm name -> whether the run stops when it begins; None never stops.
          accept_lost_rows: whether `begin` warns of lost rows instead of refusing them.
        """
        first = processes.is_first()
        self._check, self._stops = check if first else None, stops
        self._watch: alarms.Watch | None = None
        self.alarms: dict[str, list[Alarm]] = {}  # by stage, as each began
        names = FILES if first else ()
        self._paths = {name: folder / f"{name}.jsonl" for name in names}
        self._files: dict[str, BinaryIO] = {}
        for name in names:
            self._open(name)
        self._sinks = sinks
        self._stage = ""
        self._begun: list[str] = []  # stages, in order
        self._pending: tuple[int, Stats, Stats] | None = None
        self.rows: dict[str, int] = {}  # number of this stage's rows, by file
        self._sums: dict[str, sums.Rolling] = {}  # of this stage's rows, by file
        self._accept_lost_rows = accept_lost_rows
        self.latest: Row = {}  # the newest row on disk, of the step before the pending
        self._restart(time.perf_counter())

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._pending = None  # Ctrl-C does not wait for the device
        self.close()

    @property
    def sums(self) -> dict[str, Sum]:
        """{file: sum} of this stage's rows, for its snapshot."""
        return {f"{name}.jsonl": of.now() for name, of in self._sums.items()}

    def begin(
        self,
        stage: str,
        *,
        step: int = 0,
        rows: Mapping[str, int] | None = None,
        sums_of_rows: Mapping[str, Sum] | None = None,
    ) -> None:
        """Starts a stage at `step`, the number of the snapshot that it resumes from.

        Drops the rows that this stage wrote at `step` and later, and a truncated last
        line. The rows of other stages stay, so a complete stage may begin again at its
        end. `rows` and `sums_of_rows` are `self.rows` and `self.sums` as the snapshot
        recorded them; None skips the comparison.

        Raises:
          InputError: a line is not a row (the message names file and line), or the
            rows before `step` are not those that the snapshot was saved with.
        """
        self.flush()
        places = {name: jsonl.places(path) for name, path in self._paths.items()}
        for name, lines in places.items():
            if rows is None:
                break
            lost = jsonl.lost_rows(
                self._paths[name],
                lines,
                stage=stage,
                step=step,
                count=rows.get(name),
                of=(sums_of_rows or {}).get(f"{name}.jsonl"),
            )
            if lost and not self._accept_lost_rows:
                raise InputError(f"{lost}; {jsonl.LOST}")
            if lost:
                print(f"warning: {lost}; the run goes on without them", file=sys.stderr)
        self.rows = {
            name: len(jsonl.steps_of(lines, stage=stage, before=step))
            for name, lines in places.items()
        }
        if stage not in self._begun:
            self._begun.append(stage)
        for name, path in self._paths.items():
            jsonl.cut(path, places[name], step=step, begun=self._begun)
            self._files[name].close()
            self._open(name)
            self._sums[name] = sums.of_rows(path, stage=stage)
        self._stage, self.latest = stage, {}
        if self._check is not None:
            self._watch = alarms.Watch(self._check)
            self.alarms[stage] = self._watch.raised
            for _, row in jsonl.lines(self._paths["metrics"]):
                if row["stage"] == stage:
                    self._watch.see(row["step"], row)
        for sink in self._sinks:
            sink.begin(stage, step)
        self._restart(time.perf_counter())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to this step's timings.

        JAX dispatches asynchronously, so the seconds of a computation are counted in
        the phase that first waits for its result. Their sum over a step is exact.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._phases[name] = self._phases.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the seconds spent inside from this step's timings."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    def write(
        self,
        step: int,
        stats: Stats,
        *,
        positions: Stats | None = None,
        waits: Mapping[str, float] | None = None,
    ) -> None:
        """Takes a step's statistics, and writes the rows of the previous step.

        Values are written one step late, when they have reached the host, so that the
        devices never wait. A value is sum / weight, or the maximum if weight is None.
        Weight 0 is written as null, and numbers that JSON lacks as the strings "NaN",
        "Infinity" and "-Infinity", which `float` reads.

        Args:
          stats: {name: (sum, weight)}, scalars; for metrics.jsonl.
          positions: {name: (sums, weights)}, vectors over positions in the response;
            for positions.jsonl.
          waits: seconds that each side of a queue waited for the other; for
            timings.jsonl.
        """
        self._write_pending()
        vectors = {} if positions is None else positions
        jax.copy_to_host_async((stats, vectors))
        self._pending = (step, stats, vectors)
        now = time.perf_counter()
        timings = {"seconds": now - self._since, "phases": self._phases}
        if compiled := program_cache.compiled_since(self._compiled_before):
            timings["compiled"] = compiled
        if waits is not None:
            timings["waits"] = dict(waits)
        self._append("timings", step, timings)
        self._restart(now)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows of Python values: texts, token ids, scores.

        Raises:
          ValueError: a row has a key "stage" or "step", which the recorder sets.
        """
        for row in rows:
            self._append("samples", step, row)

    def flush(self) -> None:
        """Writes every row to the disk, the pending one included. Call before saving.

        `write` and `close` raise the same errors.

        Raises:
          WriteError: a file cannot be written.
          AlarmError: an alarm stops the run.
        """
        self._write_pending()
        for name, file in self._files.items():
            with write_errors.writing(self._paths[name]):
                os.fsync(file.fileno())

    def close(self) -> None:
        """Flushes the rows, and closes all files and sinks even if that fails."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
            for name, file in self._files.items():
                stack.enter_context(write_errors.writing(self._paths[name]))
                stack.callback(file.close)
            self.flush()

    def _restart(self, now: float) -> None:
        self._phases: dict[str, float] = {}
        self._since = now
        self._compiled_before = program_cache.compiled_so_far()

    def _open(self, name: str) -> None:
        with write_errors.writing(self._paths[name]):
            self._files[name] = self._paths[name].open("ab")

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        (step, *pending), self._pending = self._pending, None
        stats, vectors = processes.whole(pending)
        row = {name: _mean(*pair) for name, pair in stats.items()}
        active = [] if self._watch is None else self._watch.see(step, row)
        names = {"alarms": [alarm.name for alarm in active]} if active else {}
        self._append("metrics", step, row | names)
        if vectors:
            means = {
                name: [_mean(*pair) for pair in zip(*pairs, strict=True)]
                for name, pairs in vectors.items()
            }
            self._append("positions", step, means)
        self.latest = row
        for sink in self._sinks:
            sink.write(self._stage, step, row, active)
        if self._stops is not None:
            begun = alarms.begun(active, step=step)
            messages = [f"{x.name}: {x.message}" for x in begun if self._stops(x.name)]
            if message := processes.from_first("; ".join(messages)):
                raise AlarmError(f"step {step}, {message} (--alarms.stop)")

    def _append(self, name: str, step: int, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            return
        place = {"stage": self._stage, "step": step}
        if not place.keys().isdisjoint(row):
            raise ValueError(
                f"expected rows without {' and '.join(place)}, which every line has "
                f"already, got {', '.join(row)}; rename them"
            )
        line = place | {key: jsonl.strict(value) for key, value in row.items()}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with write_errors.writing(self._paths[name]):
            self._files[name].write(text)
            self._files[name].flush()
        self._sums.setdefault(name, sums.Rolling()).add(text)
        self.rows[name] = self.rows.get(name, 0) + 1


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSONL file, without a truncated last line; [] if missing.

    Raises:
      InputError: a line is not a row with a stage and a step; the message names it.
    """
    return [row for _, row in jsonl.lines(path)] if path.exists() else []


def first(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the row of step 0; {} if it was lost and --accept-lost-rows was given."""
    return next((row for row in rows if row["step"] == 0), {})


def finite(value: Any) -> float | None:
    """Returns a row's value if it is a finite number, else None."""
    if type(value) is float:  # the usual case, tested first
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def _mean(value: Any, weight: Any) -> float | None:
    if weight is None:
        return float(value)
    return float(value) / float(weight) if weight != 0 else None
