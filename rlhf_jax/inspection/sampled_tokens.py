"""Sampled responses token by token, as the rows of samples.jsonl have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.data import tokenization

Array = jax.Array

DIGITS = 4  # of a log-prob, nats: more would only make the file larger


def columns(
    rollout: Rollout,
    *,
    logprobs: Array,
    ref_logprobs: Array | None,
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """What each response is made of, one entry per response token.

        {"tokens": ["It", " is"], "logprobs": [-0.5, -1.2], "ref_logprobs": [-0.5, -2]}

    The pieces of `tokens` together are the response. Nothing is computed on a device:
    the arrays are those that the step has.

    Args:
      rollout: Rollout[B, S] on the host.
      logprobs: f32[B, S] on the host, nats, of the policy.
      ref_logprobs: f32[B, S] on the host, nats; None leaves them out.
      decode: ids -> text.

    Returns:
      One record per row.
    """
    told = {"logprobs": logprobs}
    if ref_logprobs is not None:
        told["ref_logprobs"] = ref_logprobs
    return [
        {
            "tokens": tokenization.pieces(
                np.asarray(tokens)[mask].tolist(), decode=decode
            ),
            **{name: rounded(array[at][mask]) for name, array in told.items()},
        }
        for at, (tokens, mask) in enumerate(
            zip(rollout.tokens, np.asarray(rollout.response_mask), strict=True)
        )
    ]


def rounded(numbers: Any) -> list[float]:
    """Numbers to as many digits as a reader can use."""
    return [round(float(number), DIGITS) for number in numbers]
