"""Likelihoods and responses of a policy on token ids; `jax.jit` stands here.

    column        0    1    2    3    4    5        S = 6 inputs, K = 2 predictions
    inputs        ·   BOS  The  cat  sat  on
    predicted                        on   the       of the continuation "on the"

Rows are padded on the left, so that the predicted tokens are in the last columns. S and
K take few values and every batch has the same number of rows, so few programs compile.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Tokens
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.logprobs import MAX_LOGITS
from rlhf_jax.models import axes, decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import decode
from rlhf_jax.models.generation.sampling import Shaping

Array = jax.Array
Params = Any
NARROWEST = 16  # columns


class Likelihood(NamedTuple):
    """The likelihood of a continuation given its context."""

    logprob: float  # Σ log π(token), nats
    greedy: bool  # whether every token is the most likely one


class Draw(NamedTuple):
    """How responses are sampled; equal settings share a program."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    shaping: Shaping | None


class Programs:
    """Likelihoods and responses of one policy."""

    def __init__(
        self,
        start: Pretrained,
        *,
        mesh: Mesh,
        batch_size: int,
        max_length: int,
        seed: int,
    ) -> None:
        """Prepares the programs, which compile on first use.

        Args:
          start: the checkpoint, with parameters on the mesh.
          batch_size: rows of every batch, a multiple of the mesh's row devices.
          max_length: largest number of tokens that the model reads.
          seed: seed of sampled responses.
        """
        self._start, self._mesh = start, mesh
        self._rows, self._max_length = batch_size, max_length
        self._key = sharding.place(jax.random.key(seed), mesh=mesh)
        on = functools.partial(sharding.on, mesh)
        self._score = jax.jit(functools.partial(on(score), model=start.model))
        self._respond = jax.jit(
            functools.partial(on(respond), model=start.model),
            static_argnames=("draw",),
        )

    def likelihoods(
        self, texts: Sequence[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[int, Likelihood]]:
        """Yields likelihoods of continuations, batch by batch.

        A context that is too long loses its first tokens.

        Args:
          texts: (context, continuation), neither of them empty.

        Yields:
          The index of a text, and its likelihood.

        Raises:
          InputError: a text is empty, or a continuation is longer than the model's
            context.
        """
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (context, continuation) in enumerate(texts):
            if not context or not continuation:
                empty = "continuation" if context else "context"
                raise InputError(
                    f"text {number}: expected a context and a continuation of at least "
                    f"a token each, got no {empty}; give BOS or EOS as the context"
                )
            if len(continuation) > self._max_length:
                raise InputError(
                    f"continuation: expected at most the {self._max_length} tokens "
                    f"that the model reads, got {len(continuation)}; choose a task of "
                    f"shorter ones"
                )
            read = min(len(context) + len(continuation) - 1, self._max_length)
            widths = bucket(read, limit=self._max_length)
            groups[widths, bucket(len(continuation), limit=self._max_length)].append(
                number
            )
        for (width, predicted), numbers in sorted(groups.items(), reverse=True):
            for chosen in self._batches(numbers):
                rows = [[*texts[at][0], *texts[at][1]][:-1] for at in chosen]
                inputs, mask = self._padded(
                    [row[-self._max_length :] for row in rows], width=width
                )
                targets, target_mask = self._padded(
                    [texts[number][1] for number in chosen], width=predicted
                )
                logprobs, greedy = processes.whole(
                    self._score(self._start.params, *self._put(inputs, mask, targets))
                )
                for row, number in enumerate(dict.fromkeys(chosen)):
                    where = target_mask[row]
                    total = float(logprobs[row][where].sum(dtype=np.float64))
                    yield (number, Likelihood(total, bool(greedy[row][where].all())))

    def responses(
        self, prompts: Sequence[Tokens], *, numbers: Sequence[int], draw: Draw
    ) -> Iterator[tuple[int, Tokens]]:
        """Yields responses to prompts, batch by batch.

        A prompt that is too long loses its first tokens.

        Args:
          numbers: a number for each prompt, which determines its random key.

        Yields:
          The number of a prompt, and the tokens of its response, stop token included.

        Raises:
          InputError: `max_new_tokens` leaves no room for a prompt.
        """
        room = self._max_length - draw.max_new_tokens
        if room < 1:
            raise InputError(
                f"max_gen_toks: expected less than the {self._max_length} tokens that "
                f"the model reads, got {draw.max_new_tokens}; set a lower one in "
                f"gen_kwargs"
            )
        groups: dict[int, list[int]] = defaultdict(list)
        for at, prompt in enumerate(prompts):
            groups[bucket(min(len(prompt), room), limit=room)].append(at)
        for width, places in sorted(groups.items(), reverse=True):
            for chosen in self._batches(places):
                tokens, mask = self._padded(
                    [prompts[at][-room:] for at in chosen], width=width
                )
                index = np.array([numbers[at] for at in chosen], np.int32)
                drawn, response_mask = processes.whole(
                    self._respond(
                        self._start.params,
                        *self._put(tokens, mask, index),
                        self._key,
                        draw=draw,
                    )
                )
                for row, at in enumerate(dict.fromkeys(chosen)):
                    yield numbers[at], drawn[row][response_mask[row]].tolist()

    def _padded(self, rows: Sequence[Tokens], *, width: int) -> Any:
        return batches.pad(rows, width=width, pad_id=self._start.pad_id, left=True)

    def _put(self, *arrays: Any) -> Any:
        return row_sharding.put_rows(arrays, mesh=self._mesh)

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yields batches of equal size; the last one repeats its last number."""
        for begin in range(0, len(numbers), self._rows):
            chosen = list(numbers[begin : begin + self._rows])
            yield chosen + chosen[-1:] * (self._rows - len(chosen))


def bucket(length: int, *, limit: int) -> int:
    """Returns the least of 16, 32, 64, ... that is at least `length`, up to `limit`."""
    width = NARROWEST
    while width < length:
        width *= 2
    return min(width, limit)


def score(
    params: Params, inputs: Array, mask: Array, targets: Array, *, model: ModelConfig
) -> tuple[Array, Array]:
    """Computes log π of target tokens, and whether each is the most likely one.

    Args:
      inputs, mask: i32[B, S] and bool[B, S], padded on the left.
      targets: i32[B, K], K <= S: the token after each of the last K inputs.

    Returns:
      f32[B, K], nats, and bool[B, K]. Among equally likely tokens the one with the
      lowest id counts.
    """
    rows, size = targets.shape
    hidden = decoder.hidden_states(
        params,
        model=model,
        tokens=inputs,
        mask=mask,
        first_column=inputs.shape[1] - size,
    )[:, -size:]
    # Logits of a few columns at a time, as all of them would dominate the memory.
    room = MAX_LOGITS * axes.row_devices(rows) // (rows * model.vocab_size)
    columns = math.gcd(size, 2 ** max(room, 1).bit_length() // 2)

    def chunked(array: Array) -> Array:
        shape = (rows, size // columns, columns, *array.shape[2:])
        return array.reshape(shape).swapaxes(0, 1)

    def of_columns(part: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, targets = part
        logits = decoder.logits(params, hidden, model=model)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        return chosen, jnp.argmax(logits, axis=-1) == targets

    parts = jax.lax.map(of_columns, (chunked(hidden), chunked(targets)))
    logprobs, greedy = (x.swapaxes(0, 1).reshape(rows, size) for x in parts)
    return logprobs, greedy


def respond(
    params: Params,
    tokens: Array,
    mask: Array,
    index: Array,
    key: Array,
    *,
    model: ModelConfig,
    draw: Draw,
) -> tuple[Array, Array]:
    """Samples responses to prompts.

    Args:
      tokens, mask: i32[B, P] and bool[B, P], padded on the left.
      index: i32[B], number of the prompt, for the key of its row.

    Returns:
      i32[B, P + R] and bool[B, P + R], True at the response.
    """
    generated = decode.generate(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        keys=decode.row_keys(key, index=index, sample=jnp.zeros_like(index)),
        max_new_tokens=draw.max_new_tokens,
        stop_ids=draw.stop_ids,
        temperature=draw.temperature,
        shaping=draw.shaping,
    )
    return generated.tokens, generated.response_mask
