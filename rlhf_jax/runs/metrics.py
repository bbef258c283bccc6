"""What a run measures: a row a step, on disk before the snapshot of that step."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import jax

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.runs import alarms, write_errors
from rlhf_jax.runs.alarms import Alarm
from rlhf_jax.runs.folder import write_text

FILES = ("metrics", "timings", "samples", "positions")
EVERY_STEP = ("metrics", "timings")  # have one row per step
Row = dict[str, float | None]


class Sink(Protocol):
    """Somewhere else for the rows of metrics.jsonl: a terminal, TensorBoard, W&B."""

    def begin(self, stage: str, step: int) -> None:
        """A stage starts, or goes on, at `step`."""

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """A step's values, None where not measured, and the alarms that are active."""

    def close(self) -> None:
        """The run ends, well or not."""


class Recorder:
    """The JSONL files of a run folder, shared by a pipeline's stages.

        metrics.jsonl   {"stage": "ppo", "step": 3, "objective/kl": 1.25, ...}
        timings.jsonl   {"stage": "ppo", "step": 3, "seconds": 2.1, "phases": {...}}
        samples.jsonl   {"stage": "ppo", "step": 3, ...}, any number of rows a step
        positions.jsonl {"stage": "ppo", "step": 3, "k1": [0.1, 0.0, ...], ...}

    A row of metrics.jsonl that an alarm is active at names it: "alarms": ["kl"].

    Step N is the one that snapshot N + 1 is the first to contain:

        with metrics.Recorder(folder) as record:
            record.begin("ppo", step=start)
            for step in range(start, num_steps):
                with record.phase("sample"):
                    ...
                record.write(step, stats)
                if (step + 1) % snapshot_every == 0:
                    record.flush()
                    snapshots.save(step + 1, ...)

    Because rows reach the disk before their snapshot, and `begin` drops those that came
    after it, a run that was killed and resumed leaves the files of one that was not.
    Only timings.jsonl has a clock in it. Of several processes the first writes, and
    decides on alarms.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sinks: Sequence[Sink] = (),
        check: alarms.Check | None = None,
        accept_lost_rows: bool = False,
    ) -> None:
        """Opens the files.

        Args:
          check: decides on alarms; None on none.
          accept_lost_rows: whether `begin` warns of lost rows, or refuses them.
        """
        first = processes.is_first()
        self._check = check if first else None
        self._watch: alarms.Watch | None = None
        self.alarms: dict[str, list[Alarm]] = {}  # of each stage, when they began
        names = FILES if first else ()
        self._paths = {name: folder / f"{name}.jsonl" for name in names}
        self._files: dict[str, BinaryIO] = {}
        for name in names:
            self._open(name)
        self._sinks = sinks
        self._stage = ""
        self._begun: list[str] = []  # stages, in order
        self._pending: tuple[int, Stats, Stats] | None = None
        self.rows: dict[str, int] = {}  # of this stage, by file
        self._accept_lost_rows = accept_lost_rows
        self.latest: Row = {}  # the newest row on disk, of the step before the pending
        self._phases: dict[str, float] = {}
        self._since = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._pending = None  # Ctrl-C does not wait for the device
        self.close()

    def begin(
        self, stage: str, *, step: int = 0, rows: Mapping[str, int] | None = None
    ) -> None:
        """Starts a stage at `step`, the number of the snapshot that it goes on from.

        Drops the rows that this stage wrote at `step` and later, and a last line that
        was cut off. The rows of other stages stay, so a stage that was already
        complete may begin at its end again.

        Args:
          rows: `self.rows` when snapshot `step` was saved; None does not compare.

        Raises:
          InputError: a line of a file is not a row; names file and line. A file has
            more or fewer rows of before `step` than `rows` says.
        """
        self.flush()
        kept = {
            name: [
                row["step"]
                for row in read(path)
                if row["stage"] == stage and row["step"] < step
            ]
            for name, path in self._paths.items()
        }
        if rows is not None:
            self._check_rows(stage, step, kept, rows)
        self.rows = {name: len(steps) for name, steps in kept.items()}
        if stage not in self._begun:
            self._begun.append(stage)
        for name, path in self._paths.items():
            _cut(path, step=step, begun=self._begun)
            self._files[name].close()
            self._open(name)
        self._stage, self.latest = stage, {}
        if self._check is not None:
            self._watch = alarms.Watch(self._check)
            self.alarms[stage] = self._watch.raised
            for row in read(self._paths["metrics"]):
                if row["stage"] == stage:
                    self._watch.see(row["step"], row)
        for sink in self._sinks:
            sink.begin(stage, step)
        self._phases, self._since = {}, time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to this step's timings.

        Devices work behind Python: the seconds of a computation fall to the phase that
        first waits for its result. The sum over a step is right.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._phases[name] = self._phases.get(name, 0.0) + seconds

    def write(self, step: int, stats: Stats, *, positions: Stats | None = None) -> None:
        """Takes a step's statistics, and writes the rows of the step before.

        One step late the values have long reached the host, so the devices never
        wait. A value is sum / weight, or the maximum where weight is None; null is
        weight 0, and "NaN", "Infinity" and "-Infinity" are strings, since JSON has
        no such numbers (`float` reads them).

        Args:
          stats: {name: (sum, weight)}, scalars; for metrics.jsonl.
          positions: the same of vectors, as `objective.kl_by_position`; for
            positions.jsonl. None writes no row there.
        """
        self._write_pending()
        vectors = {} if positions is None else positions
        jax.copy_to_host_async((stats, vectors))
        self._pending = (step, stats, vectors)
        now = time.perf_counter()
        timings = {"seconds": now - self._since, "phases": self._phases}
        self._append("timings", step, timings)
        self._phases, self._since = {}, now

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows of Python values: texts, token ids, scores.

        Raises:
          ValueError: a row has a stage or step of its own, by which a resume would cut.
        """
        for row in rows:
            self._append("samples", step, row)

    def flush(self) -> None:
        """Puts every row on the disk, the pending one included. Call before saving.

        Raises:
          WriteError: a file cannot be written; so do `write` and `close`.
        """
        self._write_pending()
        for name, file in self._files.items():
            with write_errors.writing(self._paths[name]):
                os.fsync(file.fileno())

    def close(self) -> None:
        """Flushes, and closes the files and the sinks, all of them."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
            for name, file in self._files.items():
                stack.enter_context(write_errors.writing(self._paths[name]))
                stack.callback(file.close)
            self.flush()

    def _check_rows(
        self,
        stage: str,
        step: int,
        kept: Mapping[str, Sequence[int]],
        rows: Mapping[str, int],
    ) -> None:
        """InputError, or a warning, where a file is not as the snapshot left it."""
        for name, steps in kept.items():
            if len(steps) == rows.get(name):
                continue
            lost = sorted(set(range(step)) - set(steps))
            twice = sorted(at for at, n in collections.Counter(steps).items() if n > 1)
            which = ""
            if name in EVERY_STEP:
                which = f" (missing are {_ranges(lost)})" if lost else ""
                which += f" (more than once {_ranges(twice)})" if twice else ""
            told = (
                f"{self._paths[name]}: expected the {rows.get(name)} rows of {stage} "
                f"that snapshot {step} was saved with, got {len(steps)}{which}"
            )
            if not self._accept_lost_rows:
                raise InputError(
                    f"{told}; put the file back as it was, or go on without them with "
                    f"--accept-lost-rows, which changes nothing in what is trained"
                )
            print(f"warning: {told}; the run goes on without them", file=sys.stderr)

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

    def _append(self, name: str, step: int, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            return
        place = {"stage": self._stage, "step": step}
        if not place.keys().isdisjoint(row):
            raise ValueError(
                f"expected rows without {' and '.join(place)}, which every line has "
                f"already, got {', '.join(row)}; rename them"
            )
        line = place | {key: _strict(value) for key, value in row.items()}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        with write_errors.writing(self._paths[name]):
            self._files[name].write(text.encode() + b"\n")
            self._files[name].flush()
        self.rows[name] = self.rows.get(name, 0) + 1


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, without a last line that was cut off.

    Raises:
      InputError: a line is not a row with a stage and a step; names file and line.
    """
    return [row for _, row in _lines(path)]


class TensorBoard:
    """Events in folder/tensorboard, by stage and step (extra `tensorboard`).

    A resumed run writes the steps after its snapshot again, with the same values.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self._writer = SummaryWriter(os.fspath(folder / "tensorboard"))

    def begin(self, stage: str, step: int) -> None:
        """Does nothing: every row names its stage."""

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Writes a scalar for every measured value, and a text for a new alarm."""
        for name, value in row.items():
            if value is not None:
                self._writer.add_scalar(f"{stage}/{name}", value, step)
        for alarm in alarms.begun(active, step=step):
            self._writer.add_text(f"{stage}/alarms/{alarm.name}", alarm.message, step)

    def close(self) -> None:
        """Closes the writer, which flushes it."""
        self._writer.close()


class Wandb:
    """A W&B run named for the folder, each stage on its own step axis (extra `wandb`).

    The run's id stands in folder/wandb.txt, so that a resume goes on with it.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = folder / "wandb.txt"
        if not id_file.exists():
            write_text(id_file, uuid.uuid4().hex)
        self._run = wandb.init(
            project="rlhf_jax",
            name=folder.absolute().name,
            id=id_file.read_text(),
            resume="allow",
            dir=folder,
            config=config,
        )

    def begin(self, stage: str, step: int) -> None:
        """Gives the stage's metrics a step axis of their own."""
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(
        self, stage: str, step: int, row: Row, active: Sequence[Alarm] = ()
    ) -> None:
        """Logs every measured value, and raises a W&B alert for a new alarm."""
        values = {name: value for name, value in row.items() if value is not None}
        self._run.log({f"{stage}/{k}": v for k, v in {"step": step, **values}.items()})
        for alarm in alarms.begun(active, step=step):
            title = f"{stage} step {step}: {alarm.name}"
            self._run.alert(title=title, text=alarm.message)

    def close(self) -> None:
        """Finishes the W&B run."""
        self._run.finish()


def _mean(value: Any, weight: Any) -> float | None:
    if weight is None:
        return float(value)
    return float(value) / float(weight) if weight != 0 else None


def _strict(value: Any) -> Any:
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    *complete, _ = path.read_bytes().split(b"\n")
    return [(line, _parse(line, path, n)) for n, line in enumerate(complete, start=1)]


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        match json.loads(line):
            case {"stage": str(), "step": int()} as row:
                return row
    raise InputError(
        f"{path}, line {number}: expected an object with 'stage' and 'step', got "
        f"{line[:60]!r}; put the file back as it was, or remove the line and resume "
        f"with --accept-lost-rows"
    )


def _ranges(steps: Sequence[int]) -> str:
    """ "step 3", or "steps 1, 4 to 6": neighbours taken together."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    told = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:8]]
    more = ["and more"] if len(runs) > 8 else []
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(told + more)}"


def _cut(path: Path, *, step: int, begun: Sequence[str]) -> None:
    """Drops the rows of the last stage in `begun` from `step` on; the others' stay.

    Its rows move behind those of the stages begun before it, of which one that went
    back has written its last rows again.
    """
    *earlier, stage = begun
    kept = [
        (line + b"\n", row["stage"])
        for line, row in _lines(path)
        if row["stage"] != stage or row["step"] < step
    ]
    order = [of for _, of in kept if of == stage or of in earlier]
    moves = order != sorted(order, key=begun.index)
    if moves:
        kept.sort(key=lambda row: row[1] == stage)
    text = b"".join(line for line, _ in kept)
    if moves or len(text) < path.stat().st_size:
        write_text(path, text.decode())
