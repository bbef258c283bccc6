"""The rows of samples.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.text import Written
from rlhf_jax.devices import row_sharding
from rlhf_jax.inspection import sampled_tokens
from rlhf_jax.roles import rewards
from rlhf_jax.roles.rewards import transcripts
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.sampling.sampler import versions

Array = jax.Array


def sample_rows(
    rollout: Rollout,
    scores: Array | Scores | None,
    *,
    reported: Callable[[Any], Any],
    ref_logprobs: Array | None,
    policy: Pretrained,
    prompts: Sequence[Written],
    count: int,
    beside: Rollout | None = None,
    likely: tuple[Array, Array, Array] | None = None,
) -> list[dict[str, Any]]:
    """The first responses of a batch, for samples.jsonl.

    Args:
      scores: None of a run without rewards, whose rows have none.
      reported: the rows that are the policy's own.
      ref_logprobs: f32[B, S], nats, of the rollout; None leaves them out.
      policy: that decodes.
      prompts: the prompts as they were written, by row of the data set.
      count: of rows.
      beside: the reference's responses to the same prompts; None leaves them out.
      likely: of `sampled_tokens.likeliest`, of these rows; None leaves them out.
    """
    if scores is None:
        scores = jnp.zeros(rollout.index.shape, jnp.float32)
    total = rewards.scores_of(scores).total
    mine = row_sharding.local_rows((rollout, total, ref_logprobs, beside))
    shown, total, ref_logprobs, beside = jax.tree.map(
        lambda leaf: leaf[:count], reported(mine)
    )
    rows = [
        {
            "row": int(row),
            "prompt": prompt,
            "response": response,
            "score": float(score),
            "version": version,
            **tokens,
        }
        for row, score, version, (prompt, response), tokens in zip(
            shown.index,
            total,
            versions(shown),
            transcripts.texts(shown, decode=policy.decode, prompts=prompts),
            sampled_tokens.columns(
                shown,
                logprobs=shown.old_logprobs,
                ref_logprobs=ref_logprobs,
                decode=policy.decode,
            ),
            strict=True,
        )
    ]
    if beside is not None:
        texts = transcripts.texts(beside, decode=policy.decode, prompts=prompts)
        for row, (_, text) in zip(rows, texts, strict=True):
            row["reference"] = text
    if likely is not None:
        others = sampled_tokens.alternatives(
            shown, jax.device_get(likely), decode=policy.decode
        )
        for row, likeliest in zip(rows, others, strict=True):
            row["alternatives"] = likeliest
    return rows
