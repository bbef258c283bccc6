"""Sampled responses token by token, for the rows of samples.jsonl."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.data import tokenization
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles import policy
from rlhf_jax.roles.rewards import transcripts

Array = jax.Array
Params = Any

DIGITS = 4  # decimals of a log-prob, nats; more would only enlarge the file


def columns(
    rollout: Rollout,
    *,
    logprobs: Array,
    ref_logprobs: Array | None,
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """Returns the tokens and log-probs of each response, one entry per token.

        {"tokens": ["It", " is"], "logprobs": [-0.5, -1.2], "ref_logprobs": [-0.5, -2]}

    The pieces of `tokens` join to the response. In an episode they include observed
    tokens, which have no log-probs:

        {"tokens": ["It", " was", "?"], "logprobs": [-0.5, null, -1.2],
         "observed": [false, true, false]}

    Args:
      rollout: Rollout[B, S], on the host.
      logprobs, ref_logprobs: f32[B, S], nats, on the host; None leaves them out.
    """
    arrays = {"logprobs": logprobs}
    if ref_logprobs is not None:
        arrays["ref_logprobs"] = ref_logprobs
    every_token, sampled = np.asarray(rollout.tokens), np.asarray(rollout.response_mask)
    every_read = transcripts.observed_of(np.asarray(rollout.mask), sampled)
    rows = []
    for at, (tokens, mask, read) in enumerate(
        zip(every_token, sampled, every_read, strict=True)
    ):
        shown = mask | read
        row: dict[str, Any] = {
            "tokens": tokenization.pieces(tokens[shown].tolist(), decode=decode)
        }
        for name, array in arrays.items():
            numbers = iter(rounded(array[at][mask]))
            row[name] = [next(numbers) if own else None for own in mask[shown]]
        if read.any():
            row["observed"] = read[shown].tolist()
        rows.append(row)
    return rows


def likeliest(
    params: Params,
    ref_params: Params,
    tokens: Array,
    mask: Array,
    *,
    model: ModelConfig,
    temperature: float,
    count: int,
) -> tuple[Array, Array, Array]:
    """Returns the policy's k likeliest tokens at each position; a row at a time.

    Args:
      params, ref_params: decoders of one shape, stored in any way.
      tokens: i32[n, S]. mask: bool[n, S].
      temperature: divides the logits of both.
      count: k.

    Returns:
      ids i32[n, S, k], the likeliest first, and f32[n, S, k] log π and log π_ref, nats.
      Column t has alternatives to tokens[:, t]; column 0 has no meaning.
    """

    def of_row(row: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        tokens, mask = (array[None] for array in row)
        every, ref_every = (
            jax.nn.log_softmax(
                policy.logits(model_params, model=model, tokens=tokens, mask=mask)[0]
                / temperature
            )
            for model_params in (params, ref_params)
        )
        likely, ids = jax.lax.top_k(every, count)
        ref_likely = jnp.take_along_axis(ref_every, ids, axis=-1)
        ids, likely, ref_likely = (
            jnp.roll(array, 1, axis=0) for array in (ids, likely, ref_likely)
        )
        return ids, likely, ref_likely

    return jax.lax.map(of_row, (tokens, mask))


def alternatives(
    rollout: Rollout,
    likely: tuple[Array, Array, Array],
    *,
    decode: Callable[[list[int]], str],
) -> list[list[list[list[Any]]]]:
    """Returns [[text, log π, log π_ref], ...] for each token of each row of `columns`.

    Observed tokens have no alternatives, as the policy did not draw them.

    Args:
      rollout: Rollout[n, S], on the host.
      likely: the result of `likeliest`, on the host.
    """
    records = []
    sampled = np.asarray(rollout.response_mask)
    every_read = transcripts.observed_of(np.asarray(rollout.mask), sampled)
    for row, (tokens, read) in enumerate(zip(rollout.tokens, every_read, strict=True)):
        places = np.flatnonzero(sampled[row] | read)
        response = np.asarray(tokens)[places].tolist()
        record = []
        for at, place in enumerate(places):
            before = response[max(0, at - tokenization.CONTEXT) : at]
            piece = functools.partial(tokenization.piece, before=before, decode=decode)
            others = zip(*(array[row, place] for array in likely), strict=True)
            record.append(
                [
                    [piece(int(token)), *rounded(numbers)]
                    for token, *numbers in ([] if read[place] else others)
                ]
            )
        records.append(record)
    return records


def rounded(numbers: Any) -> list[float]:
    """Rounds numbers to `DIGITS` decimals."""
    return [round(float(number), DIGITS) for number in numbers]
