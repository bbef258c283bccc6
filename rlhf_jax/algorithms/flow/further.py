"""The KL to references beside the first one: Scored -> Scored, or nothing to do.

    score(rollout, reference=first) ─> add(scored, further={name: Further})

Each is scored as the first one is. What goes into the reward becomes
KL_ref + Σ_i w_i·KL_i, and their log-probs go on to the loss.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rlhf_jax.algorithms.batch import Scored
from rlhf_jax.algorithms.flow.score import num_responses, score
from rlhf_jax.functional import kl, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import SizedPacking
from rlhf_jax.roles.reference.frozen import Further, References

Array = jax.Array
Params = Any


def add(
    scored: Scored,
    *,
    further: References,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    penalty: Penalty,
    policy: Params | None = None,
    packing: SizedPacking | None = None,
) -> tuple[Scored, dict[str, Further]]:
    """Adds the KL to further references to a rollout that has that to the first.

    Args:
      further: by name; log-probs are computed where there are none.

    Returns:
      Scored[B, S], whose `kl` is KL_ref + Σ_i w_i·KL_i and whose `kl_stats` have
      `objective/kl_NAME`, k1 to each reference, nats per response; and the references
      for `PolicyExperience.further`: log-probs and weights alone.

    Raises:
      InputError: there is no first reference, or exact KL is to be taken without
        `policy` or a reference's parameters.
    """
    if further and scored.ref_logprobs is None:
        raise InputError(
            f"expected the first reference with the further references "
            f"{', '.join(further)}, got none; pass reference, whose weight is 1"
        )
    mask = scored.rollout.response_mask
    total, stats, beside = scored.kl, dict(scored.kl_stats), dict[str, Further]()
    for name, other in further.items():
        try:
            rescored = score(
                scored.rollout,
                scores=scored.scores,
                reference=other.frozen,
                model=model,
                critic=None,
                critic_model=None,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                penalty=penalty,
                policy=policy,
                ref_logprobs=other.logprobs,
                packing=packing,
            )
        except InputError as error:
            raise InputError(f"reference {name}: {error}") from None
        if rescored.ref_logprobs is None:
            raise InputError(
                f"reference {name}: expected its parameters or its log-probs, got "
                f"neither; pass one of them"
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
        beside[name] = Further(None, rescored.ref_logprobs, other.weight)
    return dataclasses.replace(scored, kl=total, kl_stats=stats), beside
