"""Measurements besides the reward: fixed texts, a judge, the KL of whole responses.

    stats = evaluation.text_stats(policy, texts, model=model)     log perplexity
    stats |= evaluation.judge_stats(judge(rollout))               never trained on
    evaluation.response_kl(policy, reference, rollout=...)        KL of each response

Computed before the update of a step, the first two describe the policy that sampled
the step's rollout, as `objective/` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import sft
from rlhf_jax.algorithms.batch import Rollout, Sequences
from rlhf_jax.functional import checks, kl, masked
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles.policy import exact_kl, logprobs_from_hidden
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params

Array = jax.Array
Params = Any


def text_stats(
    policy: Params,
    texts: Mapping[str, Sequences],
    *,
    model: ModelConfig,
    base: Frozen | None = None,
    lora: LoRA | None = None,
) -> masked.Stats:
    """-(1/N) Σ log π(token | tokens before it), the log of the texts' perplexity.

    The mean is over the tokens of all batches, at temperature 1.

    Args:
      policy: parameters, or adapters of `base`.
      texts: {name: Sequences[M, b, S]}, M batches, run one at a time; the tokens of
        `response_mask` are read.

    Returns:
      {"eval/NAME_nll": (sum, weight)}, nats per token.
    """
    params = adapted_params(policy, base=base, lora=lora)

    def of_batch(batch: Sequences) -> tuple[Array, Array]:
        num_tokens = sft.predicted(batch).sum(dtype=jnp.float32)
        _, stats = sft.loss(params, batch, model=model, num_tokens=num_tokens)
        total, weight = stats["loss/language_model"]
        assert weight is not None  # a mean, not a maximum
        return total, weight

    stats: masked.Stats = {}
    for name, batches in texts.items():
        # A loop, not `vmap`: the activations of one batch are alive at a time.
        totals, weights = jax.lax.map(of_batch, batches)
        stats[f"eval/{name}_nll"] = (totals.sum(), weights.sum())
    return stats


def judge_stats(scores: Array, *, judged: Array | None = None) -> masked.Stats:
    """{"judge/score": (sum, weight)} of a held-out judge's scores of a rollout.

    The policy is not trained on these scores: if they fall while `objective/scores`
    rises, the policy exploits a weakness of its reward.

    Args:
      scores: f32[B], in the judge's units, one per response.
      judged: bool[B], False where the judge gave no score; None: it scored all.

    Returns:
      With `judged` also "judge/failed", the share of responses without a score.
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


class ResponseKL(NamedTuple):
    """The KL of a policy's responses to a reference, summed over tokens."""

    exact: Array  # f32[B], nats, Σ KL(π ‖ π_ref) over the vocabulary
    k1: Array  # f32[B], nats, Σ log π(token) - log π_ref(token)
    ref_logprobs: Array  # f32[B], nats, Σ log π_ref(token)


def response_kl(
    policy: Params,
    reference: Params,
    *,
    rollout: Rollout,
    model: ModelConfig,
    ref_model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
) -> ResponseKL:
    """The KL of each response to the reference, from a forward pass of each model.

    `exact` and `k1` both estimate KL(π ‖ π_ref) of whole responses drawn from π. `k1`
    reads only the drawn tokens. `exact` takes the expectation over each token at the
    drawn prefixes, so its variance is smaller.
    """
    first_column = rollout.tokens.shape[1] - max_new_tokens
    texts = texts_of(rollout.tokens, rollout.mask, first_column=first_column)
    reading: dict[str, Any] = {"texts": texts, "temperature": temperature}
    hidden = texts.hidden_states(policy, model=model)
    ref_hidden = texts.hidden_states(reference, model=ref_model)
    exact = exact_kl(
        policy,
        hidden,
        reference,
        ref_hidden,
        model=model,
        ref_model=ref_model,
        **reading,
    )
    logprobs, _ = logprobs_from_hidden(policy, hidden, model=model, **reading)
    ref_logprobs, _ = logprobs_from_hidden(
        reference, ref_hidden, model=ref_model, **reading
    )

    def summed(x: Array) -> Array:
        return jnp.sum(x, axis=1, where=rollout.response_mask)

    return ResponseKL(
        summed(exact), summed(kl.k1(logprobs, ref_logprobs)), summed(ref_logprobs)
    )
