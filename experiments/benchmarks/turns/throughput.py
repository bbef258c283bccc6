"""Measures episodes of several turns whose rows do not wait for each other's tools.

    python experiments benchmarks.turns.throughput --out runs/benchmark_turns

A GPT-2 of random weights samples turns of geometric length; a tool answers each with
--observation-size tokens after --latencies seconds. Two loops sample the same episodes,
except for a few rows where rounding decides between two tokens (checked):

- `episodes`, the loop of `--environment`: a finished turn goes to its tool at once
  while other rows continue, and the model reads only the tokens of the observation.
- `whole`: every turn reads the whole conversation again, samples until all rows have
  finished the turn, and then waits for all tools.

For each latency the table has sampled tokens per second, the share of the time in which
no program of the model ran, and tokens read per sampled token, without padding. The
tool sleeps in a thread and uses no processor. Seconds are medians over --repeats after
an uncounted round; the loops take turns.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import decode as decode_benchmark
from benchmarks.turns.conversations import (
    Config,
    Encoder,
    HostArray,
    Measured,
    Tool,
    prompts,
)
from benchmarks.turns.whole import Whole
from rlhf_jax import decoder
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.environments.episodes import Limits
from rlhf_jax.environments.programs import EpisodePrograms
from rlhf_jax.environments.sampler import EpisodeSampler
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.runs import command_line
from rlhf_jax.runs.folder import open_run, write_summary


class Timed(EpisodePrograms):
    """The programs of a run, with their seconds and the number of tokens read."""

    seconds = 0.0
    tokens_run = 0

    def read(self, arrivals: Arrivals) -> None:
        began = time.perf_counter()
        super().read(arrivals)
        self.seconds += time.perf_counter() - began
        self.tokens_run += int(np.sum(arrivals.count))

    def advance(self, *, until: HostArray, steps: int) -> Episodes:
        began = time.perf_counter()
        view = super().advance(until=until, steps=steps)
        self.seconds += time.perf_counter() - began
        return view


def by_episodes(params: Any, *, options: Config, sampler: EpisodeSampler) -> Measured:
    """Samples the episodes with the loop of a run."""
    programs = sampler.programs
    assert isinstance(programs, Timed)
    programs.seconds, programs.tokens_run = 0.0, 0
    began = time.perf_counter()
    drawn = sampler(params, Request(prompts(options), jax.random.key(options.seed)))
    seconds = time.perf_counter() - began
    sampled = int(np.sum(drawn.rollout.response_mask))
    # The stop token of a turn is read together with the next observation.
    run = programs.tokens_run + sampled - options.rows
    tokens = np.asarray(drawn.rollout.tokens)[:, options.prompt_size :]
    return Measured(tokens, sampled, run, seconds, programs.seconds)


def check_same(actual: HostArray, expected: HostArray) -> None:
    """Checks that the loops drew the same episodes, except where rounding decides.

    Raises:
      RuntimeError: more than 1 + B/50 of the B rows differ.
    """
    apart = int((actual != expected).any(axis=1).sum())
    if apart > 1 + len(actual) // 50:
        raise RuntimeError(
            f"expected both loops to draw the same episodes, but for one and 2 % of "
            f"them at most, got {apart} of {len(actual)} that differ; the loop of "
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
    programs = Timed(
        recipe,
        columns=options.prompt_size + options.room,
        places=options.rows,
        chunk=options.chunk,
    )
    sampler = EpisodeSampler(
        programs,
        pool=tool,
        encoder=encoder,
        decode=str,
        limits=Limits(options.room, options.turn_size, options.num_turns),
        states=[bytes([row, 0]) for row in range(options.rows)],
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
            seconds = statistics.median(lap.seconds for lap in timed)
            waits = [1 - lap.device_seconds / lap.seconds for lap in timed]
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
