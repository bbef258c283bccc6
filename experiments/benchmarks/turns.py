"""Episodes of several turns: places that draw while others wait for their tools.

    python experiments benchmarks.turns --out runs/benchmark_turns

A GPT-2 of random weights draws turns of geometric length; a tool answers each with
--observation-size tokens after --latencies seconds. Two loops draw the same episodes,
but for a few rows where rounding decides which token is drawn (checked):

- `episodes`, the loop of `--environment`: a finished turn goes to its tool at once, the
  other places draw on, and of an observation only its own tokens are run.
- `whole`: every turn runs the whole conversation again, draws until all rows have
  finished the turn, then waits for all tools.

For each latency it shows sampled tokens per second, the share of the time in which no
program of the model ran, and tokens run per sampled token, padding left out. The tool
sleeps in a thread: it takes none of the processors. Seconds are medians of --repeats
after one that is not counted, the loops one after another in every round.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import decode as decode_benchmark
from rlhf_jax import config, decode, decoder
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.environments.answers import Answer
from rlhf_jax.environments.episodes import Limits
from rlhf_jax.functional import checks
from rlhf_jax.models import cached_decoder, layout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import episode_places, episodes
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.runs import command_line
from rlhf_jax.runs.folder import open_run, write_summary
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.train.environment.sampler import EpisodeSampler

HostArray = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_layers: int = 4
    """Of the model."""
    hidden_size: int = 256
    """Of the model."""
    num_heads: int = 4
    """Of the model."""
    vocab_size: int = 512
    """Of the model."""
    rows: int = 32
    """Episodes, and places."""
    group_size: int = 1
    """Episodes of one prompt, in neighbouring rows."""
    prompt_size: int = 64
    """Tokens of a prompt."""
    num_turns: int = 4
    """Of an episode."""
    turn_size: int = 32
    """Most tokens of a turn; turns have half of it in the mean, at most."""
    observation_size: int = 48
    """Tokens of an observation."""
    chunk: int = 32
    """Columns that are read at a time."""
    latencies: tuple[float, ...] = (0.0, 0.05, 0.5)
    """Seconds of a tool, one after another."""
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
        """R, columns of an episode behind its prompt."""
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
    """Answers after a while with tokens that depend on the row and the turn alone."""

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
    """The tokens of observations, none of which stops a turn."""

    options: Config

    def observation(self, written: Any, *, where: str = "") -> list[int]:
        """As `TurnEncoder.observation`."""
        row, turn = map(int, written.split())
        rng = np.random.default_rng((self.options.seed, row, turn))
        first, size = len(self.options.stop_ids), self.options.observation_size
        return rng.integers(first, self.options.vocab_size, size).tolist()


class Timed(EpisodeSampler):
    """The sampler of runs, with the seconds of its programs and the tokens run."""

    seconds = 0.0
    tokens_run = 0

    def read(self, arrivals: Arrivals) -> None:
        began = time.perf_counter()
        super().read(arrivals)
        self.seconds += time.perf_counter() - began
        self.tokens_run += int(np.sum(arrivals.count))

    def advance(self, *, until: int, steps: int) -> Episodes:
        began = time.perf_counter()
        view = super().advance(until=until, steps=steps)
        self.seconds += time.perf_counter() - began
        return view


@dataclasses.dataclass
class Measured:
    """One rollout."""

    responses: HostArray  # i32[B, R], sampled and observed tokens, 0 behind them
    sampled: int  # tokens
    tokens_run: int
    seconds: float
    device_seconds: float


def prompts(options: Config) -> Prompts:
    """Of random tokens."""
    rng = np.random.default_rng(options.seed)
    shape = (options.rows, options.prompt_size)
    number = np.arange(options.rows, dtype=np.int32)
    index: Any = number // options.group_size
    tokens: Any = rng.integers(0, options.vocab_size, shape).astype(np.int32)[index]
    mask: Any = np.ones(shape, bool)
    sample: Any = number % options.group_size
    return Prompts(tokens=tokens, mask=mask, index=index, sample=sample)


def by_episodes(params: Any, *, options: Config, sampler: Timed) -> Measured:
    """The loop of a run."""
    sampler.seconds, sampler.tokens_run = 0.0, 0
    began = time.perf_counter()
    drawn = sampler(
        params,
        prompts=prompts(options),
        states=[bytes([row, 0]) for row in range(options.rows)],
        key=jax.random.key(options.seed),
    )
    seconds = time.perf_counter() - began
    sampled = int(np.sum(drawn.rollout.response_mask))
    # The stop token of a turn is run with what is observed behind it.
    run = sampler.tokens_run + sampled - options.rows
    tokens = np.asarray(drawn.rollout.tokens)[:, options.prompt_size :]
    return Measured(tokens, sampled, run, seconds, sampler.seconds)


class Whole:
    """The loop that runs the whole conversation again in every turn."""

    def __init__(self, options: Config, *, tool: Tool) -> None:
        self._options, self._tool = options, tool
        static: dict[str, Any] = {
            "model": options.model,
            "stop_ids": options.stop_ids,
            "temperature": 1.0,
        }
        self._layers = jax.jit(
            functools.partial(
                cached_decoder.layers_to_decode,
                model=options.model,
                rows=options.rows,
            )
        )
        self._read = jax.jit(
            functools.partial(episodes.read, **static), donate_argnums=1
        )
        self._advance = jax.jit(
            functools.partial(episodes.advance, **static), donate_argnums=1
        )

    def __call__(self, params: Any) -> Measured:
        options, began = self._options, time.perf_counter()
        given, encoder = prompts(options), Encoder(options)
        key, _ = jax.random.split(jax.random.key(options.seed))
        keys = decode.row_keys(key, index=given.index, sample=given.sample)
        behind: dict[int, list[int]] = {row: [] for row in range(options.rows)}
        going, sampled, run, device = list(behind), 0, 0, 0.0
        for turn in range(options.num_turns):
            start = time.perf_counter()
            state = self._drawn(params, given, behind, going, keys)
            lengths, tokens = jax.device_get((state.length, state.tokens))
            device += time.perf_counter() - start
            futures = {}
            for row in going:
                before = len(behind[row])
                behind[row] = tokens[row, options.prompt_size : lengths[row]].tolist()
                sampled += len(behind[row]) - before
                run += int(lengths[row]) - 1
                begun = bytes([int(given.index[row]), turn])
                futures[row] = self._tool.step(begun, "")
            answers = {row: future.result() for row, future in futures.items()}
            going = [
                row
                for row, answer in answers.items()
                if not answer.done and behind[row][-1] in options.stop_ids
            ]
            for row in going:
                behind[row] += encoder.observation(answers[row].observation)
        responses = np.zeros((options.rows, options.room), np.int32)
        for row, ids in behind.items():
            responses[row, : len(ids)] = ids
        seconds = time.perf_counter() - began
        return Measured(responses, sampled, run, seconds, device)

    def _drawn(
        self,
        params: Any,
        given: Prompts,
        behind: dict[int, list[int]],
        going: list[int],
        keys: Any,
    ) -> Episodes:
        """A turn of the rows that go on, from empty caches."""
        options = self._options
        longest = max(len(behind[row]) for row in going)
        width = -(-max(longest, 1) // options.chunk) * options.chunk
        rows = np.arange(options.rows, dtype=np.int32)
        place: Any = np.where(np.isin(rows, going), rows, options.rows)
        rest: Any = np.zeros((options.rows, width), np.int32)
        count: Any = np.zeros(options.rows, np.int32)
        for row in going:
            rest[row, : len(behind[row])] = behind[row]
            count[row] = len(behind[row])
        yes: Any = np.ones(options.rows, bool)
        turn: Any = np.full(options.rows, options.turn_size, np.int32)
        arrivals = Arrivals(
            place=place,
            tokens=given.tokens,
            count=jnp.full(options.rows, options.prompt_size, jnp.int32),
            begins=yes,
            prompt=yes,
            draws=yes if not longest else ~yes,
            turn=turn,
            keys=keys,
        )
        # Room for the padding of the widest read.
        columns = 2 * (options.prompt_size + options.room) + options.chunk
        state = episode_places.empty(
            options.model, places=options.rows, columns=columns, key=keys[0]
        )
        layers = self._layers(params)
        state = self._read(params, state, arrivals, layers=layers)
        if longest:
            more = dataclasses.replace(
                arrivals, tokens=rest, count=count, begins=~yes, prompt=~yes, draws=yes
            )
            state = self._read(params, state, more, layers=layers)
        return self._advance(
            params,
            state,
            until=jnp.zeros((), jnp.int32),
            steps=jnp.full((), options.turn_size, jnp.int32),
            layers=layers,
        )


def check_same(found: HostArray, wanted: HostArray) -> None:
    """That the loops drew the same episodes, but for a few that rounding parts.

    Raises:
      RuntimeError: more than one and 2 % of the rows differ.
    """
    apart = int((found != wanted).any(axis=1).sum())
    if apart > 1 + len(found) // 50:
        raise RuntimeError(
            f"expected both loops to draw the same episodes, but for one and 2 % of "
            f"them at most, got {apart} of {len(found)} that differ; the loop of "
            f"episodes is at fault: please report it"
        )


def main(options: Config) -> None:
    folder = open_run(options)
    params = jax.jit(decoder.init, static_argnames="model")(
        jax.random.key(options.seed), model=options.model
    )
    tool: Any = Tool(options)
    encoder: Any = Encoder(options)
    recipe = GRPO(
        model=options.model,
        policy_optimizer=optax.sgd(0.0),
        max_new_tokens=options.room,
        stop_ids=options.stop_ids,
        group_size=2,
        temperature=1.0,
    )
    sampler = Timed(
        recipe,
        pool=tool,
        encoder=encoder,
        decode=str,
        limits=Limits(options.room, options.turn_size, options.num_turns),
        prompt_size=options.prompt_size,
        places=options.rows,
        chunk=options.chunk,
    )
    loops = {
        "episodes": functools.partial(
            by_episodes, params, options=options, sampler=sampler
        ),
        "whole": functools.partial(Whole(options, tool=tool), params),
    }
    table = []
    for latency in options.latencies:
        tool.latency = latency
        rounds: dict[str, list[Measured]] = {name: [] for name in loops}
        for _ in range(1 + options.repeats):
            for name, run in loops.items():
                rounds[name].append(run())
        check_same(rounds["episodes"][0].responses, rounds["whole"][0].responses)
        for name, measured in rounds.items():
            timed = measured[1:]
            seconds = statistics.median(each.seconds for each in timed)
            waits = [1 - each.device_seconds / each.seconds for each in timed]
            table.append(
                {
                    "latency": latency,
                    "loop": name,
                    "tokens_per_second": timed[0].sampled / seconds,
                    "waiting_share": statistics.median(waits),
                    "run_per_sampled": timed[0].tokens_run / timed[0].sampled,
                }
            )
    decode_benchmark.show("Episodes of several turns", table)
    write_summary(folder, {"turns": table})


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
