"""The process of a participant in the benchmark, and its protocol."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.environments import PeerError
from benchmarks.peers import line_protocol
from benchmarks.peers.line_protocol import Workload

LAST_LINES = 15  # lines of stderr shown of a failed peer
SCORE_TOLERANCE = 0.1  # of the mean score, around the share of rewarded tokens
UNEVEN_TOLERANCE = 0.2  # the same if lengths differ: short responses have few tokens


class Participant:
    """A process that speaks `line_protocol`; it is killed at the end of `with`.

    Every method raises PeerError if the process dies, is too slow, does not answer with
    a JSON object, or did not do the work.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        workload: Workload,
        limit: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process; `limit` is the longest time to an answer, seconds."""
        self.name, self._workload, self._limit = name, workload, limit
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, json.dumps(dataclasses.asdict(workload))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=variables,
        )
        self._step = line_protocol.WARM_UP - 1  # the iteration of the next line
        self._rest: tuple[float, float] | None = None
        self.idle_seconds = self.idle_cpu = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # text that it did not read
                stream.close()

    def ready(self) -> dict[str, Any]:
        """The first line, after the warm-up."""
        return self._checked(self._hear("its first line"))

    def go(self) -> dict[str, Any]:
        """Runs one iteration and returns its seconds."""
        self._end_rest()
        self._step += 2
        self._say("go")
        line = self._hear("the times of an iteration")
        missing = {"rollout", "score", "update", "iteration"} - line.keys()
        if missing:
            raise PeerError(
                f"{self.name}: expected the times of an iteration, got {line} without "
                f"{', '.join(sorted(missing))}; see peers/line_protocol.py"
            )
        return self._checked(line)

    def end(self) -> dict[str, Any]:
        """Ends the process and returns its last line."""
        self._end_rest()
        self._say("end")
        return self._hear("its peak memory")

    def _say(self, word: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            print(word, file=stdin, flush=True)
        except BrokenPipeError:
            raise self._died(f"to hear {word!r}") from None

    def _hear(self, what: str) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._limit, stop)
        timer.start()
        try:
            # A library may print other lines before it can be silenced.
            line = next((line for line in stdout if line.startswith("{")), None)
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():
            raise PeerError(
                f"{self.name}: expected {what} within {self._limit:g} s, got none; "
                f"raise --limit, or leave it out.{self._last_lines()}"
            )
        if line is None:
            raise self._died(f"to say {what}")
        try:
            answer = json.loads(line)
        except json.JSONDecodeError as error:
            raise PeerError(
                f"{self.name}: expected {what} as a JSON object, got {line!r} "
                f"({error}); see peers/line_protocol.py"
            ) from None
        self._rest = (time.monotonic(), self._cpu())
        return answer

    def _checked(self, line: dict[str, Any]) -> dict[str, Any]:
        checks, workload = line["checks"], self._workload
        tokens = sum(workload.stops(self._step))
        tolerance = UNEVEN_TOLERANCE if workload.lengths else SCORE_TOLERANCE
        worth = -(-workload.vocab_size // line_protocol.DIVISOR)
        share = worth / workload.vocab_size
        wrong = [
            f"{what}, got {checks[name]}"
            for name, what, right in (
                (
                    "response_tokens",
                    f"{tokens} response tokens",
                    checks["response_tokens"] == tokens,
                ),
                (
                    "mean_score",
                    f"a mean score within {tolerance} of {share:.3f}",
                    abs(checks["mean_score"] - share) <= tolerance,
                ),
                ("loss", "a finite loss", math.isfinite(checks["loss"])),
                ("moved", "parameters that moved", checks["moved"] > 0),
            )
            if not right
        ]
        if wrong:
            raise PeerError(
                f"{self.name}: expected {'; '.join(wrong)}: it does not do the work, "
                f"so that its times say nothing; mend peers/, or leave it out"
            )
        return line

    def _died(self, expectation: str) -> PeerError:
        status = self._process.wait()
        return PeerError(
            f"{self.name}: expected it {expectation}, got its end with status "
            f"{status}; the others go on without it.{self._last_lines()}"
        )

    def _last_lines(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().splitlines()[-LAST_LINES:]
        return "\n  last of its stderr:\n" + "\n".join(f"    {line}" for line in lines)

    def _end_rest(self) -> None:
        if self._rest is not None:
            began, cpu = self._rest
            self.idle_seconds += time.monotonic() - began
            self.idle_cpu += self._cpu() - cpu

    def _cpu(self) -> float:
        """CPU seconds of all threads; 0 without /proc."""
        file = Path(f"/proc/{self._process.pid}/stat")
        if not file.exists():
            return 0.0
        fields = file.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
