"""What participants of `benchmark.py` share: the workload, and the lines they speak.

    driver                            participant
    PYTHON peer.py WORKLOAD  ──────>  builds, runs the warm-up iterations
                             <──────  {"versions": {...}, "peak_bytes": n, ...}
    go                       ──────>  two iterations; of the second
                             <──────  {"rollout": s, "score": s, "update": s,
                                       "iteration": s, "cpu": {...}, "checks": {...}}
    end                      ──────>
                             <──────  {"last_peak_bytes": n}

A line is a JSON object. What a library prints goes to stderr. The standard library
alone, as peers run in environments of their own, without rlhf_jax.
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

WARM_UP = 2  # iterations: the second shows what is compiled or allocated late
DIVISOR = 7  # a token that it divides is worth 1
EOS = 1  # ends the responses of a workload with lengths
STARTED = time.perf_counter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One PPO iteration: the shapes, and what every participant sets alike."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_positions: int  # rows of GPT-2's table of positions
    num_prompts: int  # B
    prompt_length: int  # P, tokens; no padding
    response_length: int  # R, tokens
    num_epochs: int
    num_minibatches: int  # optimizer steps an epoch
    # Tokens of responses, EOS included, that prompts choose among; none is R tokens
    # each, which nothing ends.
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
        """Random tokens, [B][P], others at every step."""
        draw = random.Random(step)
        return [
            [draw.randrange(self.vocab_size) for _ in range(self.prompt_length)]
            for _ in range(self.num_prompts)
        ]

    def stops(self, step: int) -> list[int]:
        """Tokens of the responses [B], EOS included: the same for all participants.

        A prompt chooses by the sum of its tokens, so that a compiled sampler, which
        sees prompts alone, stops where others do.
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
    """Seconds of the phases of an iteration; a phase that comes twice adds up.

    Of the wall, and `cpu` of all threads of this process.
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
        """Gives the time since the last lap to a phase."""
        now, cpu = time.perf_counter(), time.process_time()
        for seconds, since in (
            (self.seconds, now - self._last),
            (self.cpu, cpu - self._last_cpu),
        ):
            seconds[phase] = seconds.get(phase, 0.0) + since
        self._last, self._last_cpu = now, cpu

    @property
    def total(self) -> float:
        """From the start to the last lap."""
        return self._last - self._began


def read_workload() -> Workload:
    """The one on the command line; from here on stdout is the protocol's alone."""
    global _lines
    _lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    read = json.loads(sys.argv[-1])
    return Workload(**read | {"lengths": tuple(read["lengths"])})


_lines = sys.stdout


def say(line: Mapping[str, Any]) -> None:
    """One line to the driver."""
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
    """Yields the number of an iteration that is to be run now; says how long it took.

    A turn is two of them, and the second counts. In a run an iteration follows another
    one; after a pause memory that went back to the system is slow to come again, which
    costs most where a program asks for all of its memory at once.

    The body of the loop, or the library that pulls these numbers as its batches, laps
    "rollout" and "score"; what follows until it asks for the next one is "update".

    Args:
      clock: is started before each.
      versions: of the libraries that matter.
      about: what else the first line shall hold.
      check: after each, outside the times: what shows that the work was done.
      wait: returns when the devices have finished.
      prepare: after the warm-up and the reading of its peak memory: what the benchmark
        needs, and a run does not.
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
    """Whether the iteration of this number is the second of a turn."""
    return step >= WARM_UP and (step - WARM_UP) % 2 == 1


def versions_of(*packages: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}


def resident(name: str, *, process: int | str = "self") -> int | None:
    """Bytes of a process: VmRSS now, VmHWM at most so far; None where no /proc is.

    Not `getrusage`, whose maximum a process inherits from the one that started it.
    """
    status = Path(f"/proc/{process}/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
