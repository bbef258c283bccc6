"""Corrections for a sampler that differs from the trainer.

Ratio       old_logprobs are the sampler's: the loss's own ratio corrects
Recompute   old_logprobs are the trainer's, without importance weights
Truncate, Mask, Reject
            old_logprobs are the trainer's, with the importance weights of
            `functional.off_policy.importance`

sampler, in int8 or older      draws a token with log μ
trainer                        recomputes its log-prob, log π_old
weight                         a function of π_old / μ, as min(π_old / μ, cap)
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.algorithms.policy_gradient.loss import mean_distance
from rlhf_jax.functional import aggregation, checks, masked

if TYPE_CHECKING:
    from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
    from rlhf_jax.functional.off_policy.importance import Correction

TokenLevel = Literal["token", "sequence"]
ResponseLevel = Literal["sequence", "geometric"]
Array = jax.Array
Experience = TypeVar("Experience", bound=PolicyExperience)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The loss takes its ratio to the sampler's log-probs, and clips it."""

    recomputes: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The trainer recomputes old_logprobs, for training in bfloat16."""

    recomputes: ClassVar[bool] = True


class _Weights:
    """Importance weights by `importance.Correction`, LEVEL_KIND."""

    recomputes: ClassVar[bool] = True
    levels: ClassVar[tuple[str, ...]] = get_args(TokenLevel)
    kind: ClassVar[str]
    # Fields of the subclasses; a truncation has no floor.
    cap: Any
    level: Any
    floor: Any = None

    def __post_init__(self) -> None:
        # Imported here: most runs sample with the trainer and have no weights.
        from rlhf_jax.functional.off_policy import importance

        checks.one_of(level=self.level, among=self.levels)
        importance.check_bounds(self.correction, cap=self.cap, floor=self.floor)

    @property
    def correction(self) -> Correction:
        """The formula of the weights (`importance.Correction`)."""
        return cast("Correction", f"{self.level}_{self.kind}")


@dataclasses.dataclass(frozen=True)
class Truncate(_Weights):
    """Importance weights are bounded from above."""

    cap: float = 2.0
    """Largest weight, dimensionless."""
    level: TokenLevel = "token"
    """Ratio that is the weight: of the token, or of its response (sequence)."""

    kind: ClassVar[str] = "truncate"


@dataclasses.dataclass(frozen=True)
class Mask(_Weights):
    """Importance weights are 0 where the ratio is beyond its bounds."""

    cap: float
    """Upper bound of the ratio."""
    floor: float | None = None
    """Lower bound of the ratio; None is no bound."""
    level: TokenLevel = "token"
    """Ratio that is the weight: of the token, or of its response (sequence)."""

    kind: ClassVar[str] = "mask"


@dataclasses.dataclass(frozen=True)
class Reject(_Weights):
    """Responses whose ratio is beyond its bounds are left out; others have weight 1."""

    cap: float
    """Upper bound of the ratio."""
    floor: float | None = None
    """Lower bound of the ratio; None is no bound."""
    level: ResponseLevel = "sequence"
    """Ratio that is bounded: of the response (sequence), or its geometric mean over
    tokens (geometric)."""

    kind: ClassVar[str] = "reject"
    levels: ClassVar[tuple[str, ...]] = get_args(ResponseLevel)


Weighted = Truncate | Mask | Reject
SamplerCorrection = Ratio | Recompute | Truncate | Mask | Reject


def corrected(
    experience: Experience, *, rollout: Rollout, step: Array, recipe: PolicyGradient
) -> tuple[Experience, masked.Stats]:
    """Applies the importance weights of `recipe.weighted`, if there are any.

    Args:
      rollout: with recomputed `old_logprobs`.

    Returns:
      The experience, and stats {name: (sum, weight)}: `policy/sampler_mismatch`, mean
      |log π_old - log μ| over the tokens that are trained on, nats per token; and those
      of `weighted` and `staleness`.
    """
    sampler_logprobs = rollout.behaviour_logprobs
    mismatch = mean_distance(
        experience.old_logprobs, sampler_logprobs, mask=experience.response_mask
    )
    compared: masked.Stats = {"policy/sampler_mismatch": mismatch}
    weights = recipe.weighted
    if weights is None:
        return experience, compared
    experience, stats = weighted(
        experience,
        weights,
        sampler_logprobs=sampler_logprobs,
        group_size=recipe.rows_per_prompt,
    )
    return experience, compared | stats | staleness(rollout, step=step)


def weighted(
    experience: Experience,
    how: Weighted,
    *,
    sampler_logprobs: Array,
    group_size: int = 1,
) -> tuple[Experience, masked.Stats]:
    """The experience with advantages w·A, w the importance weights of a correction.

    As w >= 0, max(-ρ·wA, -clip(ρ)·wA) = w·max(-ρA, -clip(ρ)A), and likewise for every
    other surrogate: the policy loss is weighted token by token. Returns, value loss and
    entropy bonus are not weighted. A KL in the loss has weights of its own, also with
    respect to the sampler (`Penalty.importance_weights`). A rejected response is left
    out of the policy loss, the entropy bonus, the KL in the loss and their divisors;
    the critic is still trained on it.

    Args:
      experience: PolicyExperience[B, S], whose `old_logprobs` are the trainer's.
      how: formula of the weights, and its bounds.
      sampler_logprobs: f32[B, S], nats, log μ of the policy that drew the tokens.
    """
    # Imported here: few runs correct for a sampler.
    from rlhf_jax.functional.off_policy import importance, mismatch

    mask = experience.response_mask
    pair = {
        "logprobs": experience.old_logprobs,
        "sampler_logprobs": sampler_logprobs,
        "mask": mask,
    }
    output = importance.importance_weights(
        **pair, correction=how.correction, cap=how.cap, floor=how.floor
    )
    stats = mismatch.weight_stats(output, mask=mask, correction=how.correction)
    stats |= mismatch.sampler_kl(**pair)
    changed: dict[str, Array] = {
        # Into the advantages, as w >= 0: see the docstring.
        "advantages": output.weights * experience.advantages,
        "sampler_logprobs": sampler_logprobs,
    }
    if isinstance(how, Reject):
        # In the mask, so that divisors do not count rejected responses. `value_mask` is
        # unchanged: the critic still learns from them.
        changed["response_mask"] = output.mask
        if experience.prompt_scale is not None:
            # Recompute it: rejected tokens no longer count.
            changed["prompt_scale"] = aggregation.prompt_scale(
                output.mask, group_size=group_size
            )
    return dataclasses.replace(experience, **changed), stats


def staleness(rollout: Rollout, *, step: Array) -> masked.Stats:
    """The age of the parameters that drew the tokens.

    Returns:
      {name: (sum, weight)}: `policy/staleness`, step - version, mean over the response
      tokens, iterations, and `policy/staleness_max`, the largest; {} where versions are
      not recorded.
    """
    if rollout.version is None:
        return {}
    # Versions are per token.
    age = (step - rollout.version).astype(jnp.float32)
    mask = rollout.response_mask
    oldest = jnp.max(age, where=mask, initial=0.0)
    return masked.sum_stats({"policy/staleness": age}, mask=mask) | {
        "policy/staleness_max": (oldest, None)
    }
