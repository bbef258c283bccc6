"""The episodes of the benchmark: their shape, a slow tool and its observations."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from typing import Any

import numpy as np

from rlhf_jax import config
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.environments.answers import Answer
from rlhf_jax.functional import checks
from rlhf_jax.models import layout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.runs.run_config import RunConfig

HostArray = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_layers: int = 4
    """Layers of the model."""
    hidden_size: int = 256
    """Width of the model."""
    num_heads: int = 4
    """Attention heads of the model."""
    vocab_size: int = 512
    """Vocabulary of the model, tokens."""
    rows: int = 32
    """Number of episodes, and of places for them."""
    group_size: int = 1
    """Episodes per prompt, in adjacent rows."""
    prompt_size: int = 64
    """Tokens of a prompt."""
    num_turns: int = 4
    """Turns of an episode."""
    turn_size: int = 32
    """Longest turn, tokens; the mean is at most half of it."""
    observation_size: int = 48
    """Tokens of an observation."""
    chunk: int = 32
    """Columns that are read at a time."""
    latencies: tuple[float, ...] = (0.0, 0.05, 0.5)
    """Latencies of the tool to measure, seconds."""
    repeats: int = 3
    """Timed rounds of each loop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            rows=self.rows,
            group_size=self.group_size,
            prompt_size=self.prompt_size,
            num_turns=self.num_turns,
            turn_size=self.turn_size,
            observation_size=self.observation_size,
            chunk=self.chunk,
            repeats=self.repeats,
        )

    @property
    def room(self) -> int:
        """R, columns of an episode after its prompt."""
        observed = (self.num_turns - 1) * self.observation_size
        return self.num_turns * self.turn_size + observed

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(range(max(1, 2 * self.vocab_size // self.turn_size)))

    @property
    def model(self) -> ModelConfig:
        model = config.gpt2(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            max_positions=self.prompt_size + self.room,
        )
        return layout.fastest(model)


class Tool:
    """Answers after `latency` seconds with text that depends only on row and turn."""

    on_failure = "leave_out"  # as `EnvironmentPool.on_failure`: nothing fails
    counts = ()  # as `EnvironmentPool.counts`

    def __init__(self, options: Config) -> None:
        self.latency, self._options = 0.0, options
        self._threads = concurrent.futures.ThreadPoolExecutor(options.rows)

    def step(
        self, state: bytes, response: str, *, where: str = ""
    ) -> concurrent.futures.Future[Answer]:
        """As `EnvironmentPool.step`."""
        return self._threads.submit(self._answer, *state)

    def warn(self, failures: Any, *, num_episodes: int) -> None:
        """As `EnvironmentPool.warn`: nothing fails."""

    def _answer(self, row: int, turn: int) -> Answer:
        time.sleep(self.latency)
        done = turn + 1 == self._options.num_turns
        return Answer(f"{row} {turn}", 0.0, done, bytes([row, turn + 1]))


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Encodes observations as tokens, none of which stops a turn."""

    options: Config

    def observation(
        self, written: Any, *, where: str = "", room: int | None = None
    ) -> list[int]:
        """As `TurnEncoder.observation`."""
        row, turn = map(int, written.split())
        rng = np.random.default_rng((self.options.seed, row, turn))
        first, size = len(self.options.stop_ids), self.options.observation_size
        return rng.integers(first, self.options.vocab_size, size).tolist()


@dataclasses.dataclass
class Measured:
    """A rollout and its costs."""

    responses: HostArray  # i32[B, R], sampled and observed tokens, then 0
    sampled: int  # number of sampled tokens
    tokens_run: int  # number of tokens that the model read, without padding
    seconds: float
    device_seconds: float


def prompts(options: Config) -> Prompts:
    """Random prompts."""
    rng = np.random.default_rng(options.seed)
    shape = (options.rows, options.prompt_size)
    number = np.arange(options.rows, dtype=np.int32)
    index: Any = number // options.group_size
    tokens: Any = rng.integers(0, options.vocab_size, shape).astype(np.int32)[index]
    mask: Any = np.ones(shape, bool)
    sample: Any = number % options.group_size
    return Prompts(tokens=tokens, mask=mask, index=index, sample=sample)
