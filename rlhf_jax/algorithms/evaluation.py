"""What a run watches besides its reward: fixed texts under the policy, and a judge.

    stats = evaluation.text_stats(policy, texts, model=model)     log perplexity
    stats |= evaluation.judge_stats(judge(rollout))               never trained on

Taken before the update of a step, both describe the policy that sampled the step's
rollout, as `objective/` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import sft
from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.functional import checks, masked
from rlhf_jax.models.config import ModelConfig

Array = jax.Array
Params = Any


def text_stats(
    params: Params, texts: Mapping[str, Sequences], *, model: ModelConfig
) -> masked.Stats:
    """-(1/N) Σ log π(token | those before), the log of the texts' perplexity.

    The mean is over tokens, however texts are cut into batches; at temperature 1.

    Args:
      params: the decoder's.
      texts: {name: Sequences[M, b, S]}, M batches that are held one at a time; the
        tokens of `response_mask` are read.
      model: static.

    Returns:
      {"eval/NAME_nll": (sum, weight)}, nats per token.
    """

    def of_batch(batch: Sequences) -> tuple[Array, Array]:
        num_tokens = sft.predicted(batch).sum(dtype=jnp.float32)
        _, stats = sft.loss(params, batch, model=model, num_tokens=num_tokens)
        total, weight = stats["loss/language_model"]
        assert weight is not None  # a mean, not a maximum
        return total, weight

    stats: masked.Stats = {}
    for name, batches in texts.items():
        totals, weights = jax.lax.map(of_batch, batches)
        stats[f"eval/{name}_nll"] = (totals.sum(), weights.sum())
    return stats


def judge_stats(scores: Array, *, judged: Array | None = None) -> masked.Stats:
    """{"judge/score": (sum, weight)} of what a held-out judge says of a rollout.

    A reward that the policy is not trained on: if it falls while `objective/scores`
    rises, the policy has found a hole in its own.

    Args:
      scores: f32[B], in the judge's units, one per response.
      judged: bool[B], False where there is no score, whatever stands there; None: the
        judge never fails.

    Returns:
      With `judged` also "judge/failed", the share of responses without a score.

    Raises:
      ValueError: scores is not one axis, or judged not of its shape. TypeError: not f32
        or bool.
    """
    checks.shape((None,), scores=scores)
    checks.float32(scores=scores)
    size = jnp.asarray(scores.size, jnp.float32)
    if judged is None:
        return {"judge/score": (scores.sum(), size)}
    checks.same_shape(scores=scores, judged=judged)
    checks.boolean(judged=judged)
    count = judged.sum(dtype=jnp.float32)
    return {
        "judge/score": (jnp.where(judged, scores, 0.0).sum(), count),
        "judge/failed": (size - count, size),
    }
