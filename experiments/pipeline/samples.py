"""The rows of samples.jsonl, and the judge that is watched and not trained on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from pipeline.preferences import answers_in, text_of
from worlds import reviews

from rlhf_jax.algorithms import evaluation
from rlhf_jax.algorithms.batch import Rollout, Scored
from rlhf_jax.functional.masked import Stats
from rlhf_jax.inspection import sampled_tokens


def judged(answered: Rollout) -> Stats:
    """`judge/score` of a batch: the gold judge who reads sentences, not words alone."""
    return evaluation.judge_stats(jnp.asarray(_verdicts(answered), jnp.float32))


def sample_rows(scored: Scored, *, beside: Rollout, count: int) -> list[dict[str, Any]]:
    """The first responses of a batch, token by token.

    Args:
      beside: the reference's responses to the same prompts, drawn with the same keys.
      count: of rows.
    """
    shown, other = jax.tree.map(
        lambda leaf: leaf[:count], jax.device_get((scored, beside))
    )
    return [
        {
            "row": int(row),
            "prompt": prompt,
            "response": response,
            "reference": reference,
            "score": float(score),
            "judge": verdict,
            **tokens,
        }
        for row, (prompt, response), (_, reference), score, verdict, tokens in zip(
            shown.rollout.index,
            answers_in(shown.rollout),
            answers_in(other),
            shown.scores,
            _verdicts(shown.rollout),
            sampled_tokens.columns(
                shown.rollout,
                logprobs=shown.rollout.old_logprobs,
                ref_logprobs=shown.ref_logprobs,
                decode=text_of,
            ),
            strict=True,
        )
    ]


def _verdicts(answered: Rollout) -> list[float]:
    """The careful judge's word on each response, gold units."""
    return [
        reviews.careful_gold(prompt.split(), response.split())
        for prompt, response in answers_in(answered)
    ]
