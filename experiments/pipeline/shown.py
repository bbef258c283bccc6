"""Responses token by token, in the format of samples.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rlhf_jax.algorithms.batch import Scored
from rlhf_jax.roles.rewards import transcripts
from rlhf_jax.train.watch import sampled_tokens

Row = dict[str, Any]


def rows_of(
    scored: Scored,
    *,
    count: int,
    decode: Callable[[list[int]], str],
    judge: Callable[[str, str], float],
) -> list[Row]:
    """The first responses of a batch, with the scores of reward and judge.

    Args:
      count: number of rows.
      judge: (prompt, response) -> score.
    """
    read = scored.rollout, scored.scores, scored.ref_logprobs
    rollout, scores, ref_logprobs = jax.tree.map(
        lambda leaf: leaf[:count], jax.device_get(read)
    )
    return [
        {
            "row": int(index),
            "prompt": prompt,
            "response": response,
            "score": float(score),
            "judge": judge(prompt, response),
            **tokens,
        }
        for index, score, (prompt, response), tokens in zip(
            rollout.index,
            scores,
            transcripts.texts(rollout, decode=decode),
            sampled_tokens.columns(
                rollout,
                logprobs=rollout.old_logprobs,
                ref_logprobs=ref_logprobs,
                decode=decode,
            ),
            strict=True,
        )
    ]
