"""The rows of samples.jsonl, and the held-out judge's metric."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from pipeline import shown
from pipeline.preferences import answers_in, text_of
from worlds import reviews

from rlhf_jax.algorithms import evaluation
from rlhf_jax.algorithms.batch import Rollout, Scored
from rlhf_jax.functional.masked import Stats


def judged(answered: Rollout) -> Stats:
    """`judge/score` of a batch, by the gold judge who also checks the grammar."""
    verdicts = [careful_gold(*pair) for pair in answers_in(answered)]
    return evaluation.judge_stats(jnp.asarray(verdicts, jnp.float32))


def sample_rows(scored: Scored, *, beside: Rollout, count: int) -> list[dict[str, Any]]:
    """The first responses of a batch, token by token, beside the reference's.

    Args:
      beside: the reference's responses to the same prompts, drawn with the same keys.
      count: number of rows.
    """
    rows = shown.rows_of(scored, count=count, decode=text_of, judge=careful_gold)
    other = answers_in(jax.tree.map(lambda leaf: leaf[:count], jax.device_get(beside)))
    return [
        row | {"reference": reference}
        for row, (_, reference) in zip(rows, other, strict=True)
    ]


def careful_gold(prompt: str, response: str) -> float:
    """The careful judge's score of a response, gold units."""
    return reviews.careful_gold(prompt.split(), response.split())
