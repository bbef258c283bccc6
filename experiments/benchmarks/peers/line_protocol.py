"""The workload of `iteration.py`, and the protocol between driver and participants.

    driver                            participant
    PYTHON peer.py WORKLOAD  ──────>  builds, runs the warm-up iterations
                             <──────  {"versions": {...}, "peak_bytes": n, ...}
    go                       ──────>  two iterations; of the second
                             <──────  {"rollout": s, "score": s, "update": s,
                                       "iteration": s, "cpu": {...}, "checks": {...}}
    end                      ──────>
                             <──────  {"last_peak_bytes": n}

A line is a JSON object. Output of libraries goes to stderr. This file uses only the
standard library, because peers run in environments without rlhf_jax.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

WARM_UP = 2  # iterations; the second shows late compilation and allocation
DIVISOR = 7  # tokens that are multiples of it are worth 1
EOS = 1  # ends the responses of a workload with lengths
STARTED = time.perf_counter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One PPO iteration: shapes and settings that all participants share."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_positions: int  # rows of GPT-2's position embedding
    num_prompts: int  # B
    prompt_length: int  # P, tokens; no padding
    response_length: int  # R, tokens
    num_epochs: int
    num_minibatches: int  # optimizer steps per epoch
    # Pool of response lengths, EOS included, from which prompts choose; empty for
    # responses of R tokens without EOS.
    lengths: tuple[int, ...] = ()
    temperature: float = 1.0
    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    clip_range: float = 0.2
    vf_coef: float = 0.1

    def prompts(self, step: int) -> list[list[int]]:
        """Random tokens, [B][P], different at every step."""
        draw = random.Random(step)
        return [
            [draw.randrange(self.vocab_size) for _ in range(self.prompt_length)]
            for _ in range(self.num_prompts)
        ]

    def stops(self, step: int) -> list[int]:
        """Lengths of the responses [B], EOS included, equal for all participants.

        A prompt chooses by the sum of its tokens, so that a compiled sampler, which
        reads only prompts, stops at the same tokens.
        """
        if not self.lengths:
            return [self.response_length] * self.num_prompts
        count = len(self.lengths)
        return [self.lengths[sum(prompt) % count] for prompt in self.prompts(step)]

    @property
    def minibatch_size(self) -> int:
        """Rows of an optimizer step."""
        return self.num_prompts // self.num_minibatches


class Clock:
    """Seconds of the phases of an iteration; repeated phases add up.

    `seconds` is wall time, and `cpu` that of all threads of this process.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Begins an iteration."""
        self.seconds, self.cpu = {}, {}
        self._began = self._last = time.perf_counter()
        self._last_cpu = time.process_time()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to a phase."""
        now, cpu = time.perf_counter(), time.process_time()
        for seconds, since in (
            (self.seconds, now - self._last),
            (self.cpu, cpu - self._last_cpu),
        ):
            seconds[phase] = seconds.get(phase, 0.0) + since
        self._last, self._last_cpu = now, cpu

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self._began


def read_workload() -> Workload:
    """Reads the workload from the command line and reserves stdout for the protocol."""
    global _lines
    _lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    read = json.loads(sys.argv[-1])
    return Workload(**read | {"lengths": tuple(read["lengths"])})


_lines = sys.stdout


def say(line: Mapping[str, Any]) -> None:
    """Sends one line to the driver."""
    print(json.dumps(line), file=_lines, flush=True)


def iterations(
    *,
    clock: Clock,
    versions: Mapping[str, str],
    about: Mapping[str, Any],
    check: Callable[[], Mapping[str, Any]],
    wait: Callable[[], None] = lambda: None,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Yields the number of each iteration to run, and reports its times.

    A turn has two iterations, of which the second counts. In a run an iteration follows
    another; after a pause the system is slow to return memory, which costs most if a
    program allocates all its memory at once.

    The body of the loop, or the library that reads these numbers as its batches, laps
    "rollout" and "score"; the time until it asks for the next number is "update".

    Args:
      clock: started before each iteration.
      versions: versions of the main libraries.
      about: further fields of the first line.
      check: called after each iteration, untimed; returns evidence of the work done.
      wait: returns when the devices have finished.
      prepare: called after the warm-up and its memory measurement, for work that the
        benchmark needs and a run does not.
    """
    before = resident("VmRSS")
    start_up = time.perf_counter() - STARTED
    warm_up = []
    for step in range(WARM_UP):
        clock.start()
        yield step
        wait()
        clock.lap("update")
        warm_up.append(clock.total)
    peak = resident("VmHWM")
    prepare()
    say(
        {
            "versions": {"python": sys.version.split()[0], **versions},
            "start_up": start_up,
            "warm_up": warm_up,
            "before_bytes": before,
            "peak_bytes": peak,
            "checks": check(),
            **about,
        }
    )
    for number, line in enumerate(sys.stdin):
        if line.strip() != "go":
            break
        for step in (2 * number, 2 * number + 1):
            clock.start()
            yield WARM_UP + step
            wait()
            clock.lap("update")
        cpu = {"iteration": sum(clock.cpu.values()), **clock.cpu}
        seconds = {"iteration": clock.total, **clock.seconds}
        say({**seconds, "cpu": cpu, "checks": check()})
    say({"last_peak_bytes": resident("VmHWM")})


def counts(step: int) -> bool:
    """Whether an iteration is the second of a turn."""
    return step >= WARM_UP and (step - WARM_UP) % 2 == 1


def versions_of(*packages: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}


def resident(name: str, *, process: int | str = "self") -> int | None:
    """Resident bytes of a process: VmRSS now, VmHWM at the peak; None without /proc.

    `getrusage` would not do: a process inherits its maximum from its parent.
    """
    status = Path(f"/proc/{process}/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
