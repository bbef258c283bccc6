"""The baseline of `throughput`: every turn reads the whole conversation again."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.turns.conversations import Config, Encoder, Measured, Tool, prompts
from rlhf_jax import decode
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.models import cached_decoder
from rlhf_jax.models.generation import episode_places, episodes
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.models.generation.sampling import Decoder, Draw


class Whole:
    """The loop that reads the whole conversation again in every turn."""

    def __init__(self, options: Config, *, tool: Tool) -> None:
        self._options, self._tool = options, tool
        draw = Draw(options.stop_ids, unused=options.model.unused_ids)

        def compiled(function: Callable[..., Episodes]) -> Callable[..., Episodes]:
            def run(
                params: Any, state: Episodes, layers: Any, *args: Any, **numbers: Any
            ) -> Episodes:
                decoder = Decoder(params, options.model, layers)
                return function(decoder, state, *args, draw=draw, **numbers)

            return jax.jit(run, donate_argnums=1)

        self._layers = jax.jit(
            functools.partial(
                cached_decoder.layers_to_decode,
                model=options.model,
                rows=options.rows,
            )
        )
        self._read, self._advance = compiled(episodes.read), compiled(episodes.advance)

    def __call__(self, params: Any) -> Measured:
        options, began = self._options, time.perf_counter()
        batch, encoder = prompts(options), Encoder(options)
        key, _ = jax.random.split(jax.random.key(options.seed))
        keys = decode.row_keys(key, index=batch.index, sample=batch.sample)
        behind: dict[int, list[int]] = {row: [] for row in range(options.rows)}
        going, sampled, run, device = list(behind), 0, 0, 0.0
        for turn in range(options.num_turns):
            start = time.perf_counter()
            state = self._drawn(params, batch, behind, going, keys)
            lengths, tokens = jax.device_get((state.length, state.tokens))
            device += time.perf_counter() - start
            futures = {}
            for row in going:
                before = len(behind[row])
                behind[row] = tokens[row, options.prompt_size : lengths[row]].tolist()
                sampled += len(behind[row]) - before
                run += int(lengths[row]) - 1
                begun = bytes([int(batch.index[row]), turn])
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
        batch: Prompts,
        behind: dict[int, list[int]],
        going: list[int],
        keys: Any,
    ) -> Episodes:
        """Samples a turn of the unfinished rows, from empty caches."""
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
            tokens=batch.tokens,
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
        state = self._read(params, state, layers, arrivals)
        if longest:
            more = dataclasses.replace(
                arrivals, tokens=rest, count=count, begins=~yes, prompt=~yes, draws=yes
            )
            state = self._read(params, state, layers, more)
        return self._advance(
            params,
            state,
            layers,
            until=jnp.zeros((), jnp.int32),
            steps=jnp.full((), options.turn_size, jnp.int32),
        )
