"""Measures the share of correct sums of a policy, and its KL to the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from worlds.arithmetic import prompts_of, verifier

from rlhf_jax import decode, grpo, masked, ppo
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout, score
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any
Row = dict[str, Any]


def greedy(
    params: Params,
    rows: Sequence[Row],
    *,
    algorithm: ppo.PPO | grpo.GRPO,
    key: Array,
) -> float:
    """Share of the rows with a correct greedy response."""
    answered = _respond(params, rows, algorithm=algorithm, key=key, greedy=True)
    return float(np.mean(verifier(rows)(answered)))


def sampled(
    params: Params,
    reference: Frozen,
    rows: Sequence[Row],
    *,
    algorithm: ppo.PPO | grpo.GRPO,
    key: Array,
) -> Row:
    """Samples a response to each row and measures the correct share and the KL.

    Returns:
      "gold", the share that is right, and "kl", KL(π ‖ π_ref) by k1, nats per response.
    """
    answered = _respond(params, rows, algorithm=algorithm, key=key, greedy=False)
    ref_logprobs = _reference_logprobs(
        reference,
        rollout=answered,
        model=algorithm.model,
        max_new_tokens=algorithm.max_new_tokens,
        temperature=algorithm.temperature,
    )
    difference = answered.old_logprobs - ref_logprobs
    total = masked.masked_sum(difference, mask=answered.response_mask)
    return {
        "gold": float(np.mean(verifier(rows)(answered))),
        "kl": float(total) / len(rows),
    }


def _respond(
    params: Params,
    rows: Sequence[Row],
    *,
    algorithm: ppo.PPO | grpo.GRPO,
    key: Array,
    greedy: bool,
) -> Rollout:
    return _rollout(
        params,
        prompts=prompts_of(rows, batch_size=len(rows), seed=0)[0],
        key=key,
        algorithm=algorithm,
        greedy=greedy,
    )


_reference_logprobs = jax.jit(
    score.reference_logprobs,
    static_argnames=("model", "max_new_tokens", "temperature"),
)


@functools.partial(jax.jit, static_argnames=("algorithm", "greedy"))
def _rollout(
    params: Params,
    *,
    prompts: Prompts,
    key: Array,
    algorithm: ppo.PPO | grpo.GRPO,
    greedy: bool,
) -> Rollout:
    return rollout.rollout(
        params,
        model=algorithm.model,
        prompts=prompts,
        key=key,
        max_new_tokens=algorithm.max_new_tokens,
        stop_ids=algorithm.stop_ids,
        temperature=algorithm.temperature,
        shaping=decode.Shaping(greedy=True) if greedy else None,
    )
