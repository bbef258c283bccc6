"""Statistics of the objective, and the KL to further references.

    score(rollout, reference=first) ─> add_further(scored, further={name: Further})

`add_further` scores each further reference as `score` does the first. The KL in the
reward becomes KL_ref + Σ_i w_i·KL_i, and the log-probs go on to the loss.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Scored
from rlhf_jax.algorithms.flow.score import num_responses, score
from rlhf_jax.functional import kl, masked, token_rewards
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import SizedPacking
from rlhf_jax.roles.reference.frozen import Further, References

Array = jax.Array
Params = Any


def objective_stats(scored: Scored, *, kl_coef: Array, ended: Array) -> masked.Stats:
    """Statistics of the objective before an update; units: runs/README.md.

    Args:
      scored: Scored[B, S], with the scores to report.
      ended: bool[B], True where the response ends with a stop token.

    Returns:
      {name: (sum, weight)} over responses or sampled tokens. `objective/kl`,
      `objective/kl_k3` and `objective/ref_nll` need a reference; the last is -log π_ref
      in nats per token, whose mean is the log of the perplexity. Episodes of several
      turns add `response/observed`, and those with known ends of turns
      `response/turns`. Responses that are left out do not count.
    """
    mask = scored.rollout.response_mask
    counted = jnp.ones(scored.scores.shape, jnp.float32)
    if scored.row_mask is not None:
        counted = scored.row_mask.astype(jnp.float32)

    def per_response(values: Array) -> tuple[Array, Array]:
        # A row that is left out may hold NaN, and counts nowhere.
        return jnp.where(counted > 0, values, 0.0).sum(), counted.sum()

    def per_token(values: Array) -> tuple[Array, Array]:
        return masked.masked_sum(values, mask=mask), mask.sum(dtype=jnp.float32)

    stats: masked.Stats = {
        "objective/scores": per_response(scored.scores),
        "objective/kl_coef": (kl_coef, jnp.ones((), jnp.float32)),
        "objective/entropy": per_token(scored.rollout.entropy),
        "response/length": per_response(mask.sum(axis=1, dtype=jnp.float32)),
        "response/eos_fraction": per_response(ended.astype(jnp.float32)),
        "response/distinct_fraction": per_response(_first_of_its_kind(scored)),
    }
    if _has_turns(scored):
        observed = scored.rollout.observed
        stats["response/observed"] = per_response(
            observed.sum(axis=1, dtype=jnp.float32)
        )
    if scored.turn_ends is not None:
        num_turns = scored.turn_ends.sum(axis=1, dtype=jnp.float32)
        stats["response/turns"] = per_response(num_turns)
    stats |= scored.kl_stats
    penalty = jnp.zeros_like(counted)
    if scored.ref_logprobs is not None:
        pair = scored.rollout.old_logprobs, scored.ref_logprobs
        stats["objective/kl"] = per_response(
            masked.masked_sum(kl.k1(*pair), mask=mask, axis=1)
        )
        stats["objective/kl_k3"] = per_response(
            masked.masked_sum(kl.k3(*pair), mask=mask, axis=1)
        )
        stats["objective/ref_nll"] = per_token(-scored.ref_logprobs)
    if scored.kl is not None:
        penalty = token_rewards.kl_reward(scored.kl, mask=mask, kl_coef=kl_coef)
    stats["objective/non_score_reward"] = per_response(penalty)
    stats["objective/rlhf_reward"] = per_response(scored.scores + penalty)
    return stats


def kl_by_position(scored: Scored, *, max_new_tokens: int) -> masked.Stats:
    """KL at each position of the response.

        column        0  1  2  3  4  5  6      P = 3 prompt columns
        position      ·  ·  ·  0  1  2  3      R = 4

    Returns:
      {name: (f32[R] sums, f32[R] weights)}, which add up over batches. "k1" and "k3":
      nats per token, means over the responses that reach the position. "responses":
      the number of responses that reach it.
    """
    if scored.ref_logprobs is None:
        raise InputError(
            "expected a rollout with the log-probs of a reference, got one without; "
            "ask for its KL at steps where the reference is run"
        )
    # Prompts are left-padded: position t is column P + t in every row.
    response = (slice(None), slice(-max_new_tokens, None))
    mask = scored.rollout.response_mask[response]
    pair = scored.rollout.old_logprobs[response], scored.ref_logprobs[response]
    count = mask.sum(axis=0, dtype=jnp.float32)
    return {
        "k1": (masked.masked_sum(kl.k1(*pair), mask=mask, axis=0), count),
        "k3": (masked.masked_sum(kl.k3(*pair), mask=mask, axis=0), count),
        "responses": (count, jnp.ones_like(count)),
    }


def _has_turns(scored: Scored) -> bool:
    """Whether rows are episodes: one whose turns have weight 0 has no turn rewards."""
    return scored.turn_rewards is not None or scored.turn_ends is not None


def _first_of_its_kind(scored: Scored) -> Array:
    """f32[B]: 1 where no earlier row of the batch has the same sampled tokens."""
    mask, tokens = scored.rollout.response_mask, scored.rollout.tokens
    if _has_turns(scored):
        # Sampled tokens move to the front, in order: observations between turns do not
        # matter.
        sampled_first = jnp.argsort(~mask, axis=1, stable=True)
        mask, tokens = (
            jnp.take_along_axis(x, sampled_first, axis=1) for x in (mask, tokens)
        )
    # -1 is not a token: responses of different lengths never compare equal.
    responses = jnp.where(mask, tokens, -1)
    # bool[B, B], from a comparison [B, B, S] of every pair of rows.
    same = (responses[:, None, :] == responses[None, :, :]).all(axis=-1)
    return (~jnp.tril(same, k=-1).any(axis=1)).astype(jnp.float32)


def add_further(
    scored: Scored,
    *,
    further: References,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    penalty: Penalty,
    policy: Params | None = None,
    packing: SizedPacking | None = None,
    replays: bool = False,
) -> tuple[Scored, dict[str, Further]]:
    """Adds the KL to further references to a rollout scored with the first one.

    Args:
      further: by name; log-probs that are None are computed.
      the others: as in `score`.

    Returns:
      Scored[B, S], whose `kl` is KL_ref + Σ_i w_i·KL_i and whose `kl_stats` have
      `objective/kl_NAME`, k1 to each reference, nats per response; and the references
      for `PolicyExperience.further`, with log-probs and weights only.

    Raises:
      InputError: there is no first reference, or exact KL lacks `policy` or the
        parameters of a reference.
    """
    if further and scored.ref_logprobs is None:
        raise InputError(
            f"expected the first reference with the further references "
            f"{', '.join(further)}, got none; pass reference, whose weight is 1"
        )
    mask = scored.rollout.response_mask
    total, stats, references = scored.kl, dict(scored.kl_stats), dict[str, Further]()
    for name, other in further.items():
        with located(f"reference {name}"):
            rescored = score(
                scored.rollout,
                scores=scored.scores,
                reference=other.frozen,
                model=model,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                penalty=penalty,
                policy=policy,
                ref_logprobs=other.logprobs,
                packing=packing,
                replays=replays,
            )
            if rescored.ref_logprobs is None:
                raise InputError(
                    "expected its parameters or its log-probs, got neither; pass one "
                    "of them"
                )
        if total is not None and rescored.kl is not None:
            total = total + other.weight * rescored.kl
        for key, value in rescored.kl_stats.items():
            if key != "objective/kl_exact":
                stats |= masked.add_stats({key: stats[key]}, {key: value})
        per_token = kl.k1(scored.rollout.old_logprobs, rescored.ref_logprobs)
        per_response = masked.masked_sum(per_token, mask=mask, axis=1)
        rows = num_responses(mask, row_mask=scored.row_mask)
        stats[f"objective/kl_{name}"] = per_response.sum(), rows
        # No parameters: an update gathers rows of every array of its experience.
        references[name] = Further(None, rescored.ref_logprobs, other.weight)
    return dataclasses.replace(scored, kl=total, kl_stats=stats), references
