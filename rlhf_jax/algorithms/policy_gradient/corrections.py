"""A sampler that is not the trainer: the choice of what corrects for it, and how.

Ratio       old_logprobs are the sampler's, and the ratio to them is the weight
Recompute   old_logprobs are the trainer's, and nothing is weighted
Truncate, Mask, Reject
            old_logprobs are the trainer's, and tokens have the importance weights
            of `functional.off_policy.importance`

sampler, in int8 or older      draws a token with log μ
trainer                        recomputes its log-prob, log π_old
weight                         of π_old / μ, by default min(π_old / μ, cap)
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar, get_args

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
    """The ratio of the loss is to the sampler's log-probs, and the clip bounds it."""

    recomputes: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The trainer computes old_logprobs again, for training in bfloat16."""

    recomputes: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Truncate:
    """Weights are bounded from above."""

    cap: float = 2.0
    """Largest weight, dimensionless."""
    level: TokenLevel = "token"
    """Whose ratio is the weight: that of a token, or of its response."""

    recomputes: ClassVar[bool] = True
    floor: ClassVar[None] = None

    def __post_init__(self) -> None:
        checks.one_of(level=self.level, among=get_args(TokenLevel))
        _check_bounds(self.correction, cap=self.cap)

    @property
    def correction(self) -> Correction:
        """Its formula."""
        return "token_truncate" if self.level == "token" else "sequence_truncate"


@dataclasses.dataclass(frozen=True)
class Mask:
    """Weights are 0 where the ratio is beyond its bounds."""

    cap: float
    """Upper bound of the ratio."""
    floor: float | None = None
    """Lower bound of the ratio; None is none."""
    level: TokenLevel = "token"
    """Whose ratio is the weight: that of a token, or of its response."""

    recomputes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.one_of(level=self.level, among=get_args(TokenLevel))
        _check_bounds(self.correction, cap=self.cap, floor=self.floor)

    @property
    def correction(self) -> Correction:
        """Its formula."""
        return "token_mask" if self.level == "token" else "sequence_mask"


@dataclasses.dataclass(frozen=True)
class Reject:
    """Responses whose ratio is beyond its bounds are left out; others have weight 1."""

    cap: float
    """Upper bound of the ratio."""
    floor: float | None = None
    """Lower bound of the ratio; None is none."""
    level: ResponseLevel = "sequence"
    """Which ratio: that of the response, or its geometric mean over tokens."""

    recomputes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.one_of(level=self.level, among=get_args(ResponseLevel))
        _check_bounds(self.correction, cap=self.cap, floor=self.floor)

    @property
    def correction(self) -> Correction:
        """Its formula."""
        return "sequence_reject" if self.level == "sequence" else "geometric_reject"


def _check_bounds(
    correction: Correction, *, cap: float, floor: float | None = None
) -> None:
    # Imported here, as most samplers are the trainer and have no weights.
    from rlhf_jax.functional.off_policy import importance

    importance.check_bounds(correction, cap=cap, floor=floor)


Weighted = Truncate | Mask | Reject
SamplerCorrection = Ratio | Recompute | Truncate | Mask | Reject


def corrected(
    experience: Experience, *, rollout: Rollout, step: Array, recipe: PolicyGradient
) -> tuple[Experience, masked.Stats]:
    """The experience, weighted for who drew its tokens by `recipe.weighted`.

    Args:
      rollout: whose `old_logprobs` are recomputed.

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
        sampler_logprobs=sampler_logprobs,
        cap=weights.cap,
        correction=weights.correction,
        floor=weights.floor,
        group_size=recipe.rows_per_prompt,
    )
    return experience, compared | stats | staleness(rollout, step=step)


def weighted(
    experience: Experience,
    *,
    sampler_logprobs: Array,
    cap: float,
    correction: Correction = "token_truncate",
    floor: float | None = None,
    group_size: int = 1,
) -> tuple[Experience, masked.Stats]:
    """The experience with advantages w·A, w the importance weights of a correction.

    As w >= 0, max(-ρ·wA, -clip(ρ)·wA) = w·max(-ρA, -clip(ρ)A), and as much holds for
    every surrogate: the policy's loss is weighted token by token. Returns, the value
    loss, the entropy bonus and a KL in the loss are not, but for the importance weights
    of the KL's own (`Penalty`), which are over the sampler too. A rejected response is
    left out of the policy loss, the entropy bonus and the KL in the loss, and of their
    divisors; the critic is still trained on it.

    Args:
      experience: PolicyExperience[B, S], whose `old_logprobs` are the trainer's.
      sampler_logprobs: f32[B, S], nats, log μ of the weights that drew the tokens.
      cap: C, the largest weight, dimensionless.
      correction: how weights beyond the bounds are cut (`importance.Correction`).
      floor: the smallest weight of the masks and of rejection; None is none.
    """
    # Few samplers are corrected for.
    from rlhf_jax.functional.off_policy import importance, mismatch

    mask = experience.response_mask
    pair = {
        "logprobs": experience.old_logprobs,
        "sampler_logprobs": sampler_logprobs,
        "mask": mask,
    }
    output = importance.importance_weights(
        **pair, correction=correction, cap=cap, floor=floor
    )
    stats = mismatch.weight_stats(output, mask=mask, correction=correction)
    stats |= mismatch.sampler_kl(**pair)
    changed: dict[str, Array] = {
        # Into the advantages, as weights are not negative: see the docstring.
        "advantages": output.weights * experience.advantages,
        "sampler_logprobs": sampler_logprobs,
    }
    if correction.endswith("_reject"):
        # Not a weight of 0: divisors count the mask, and a rejected response is not in
        # them. `value_mask` stays, so that the critic still learns from it.
        changed["response_mask"] = output.mask
        if experience.prompt_scale is not None:
            # Computed from the mask before the rejection, it would divide by tokens
            # that are gone.
            changed["prompt_scale"] = aggregation.prompt_scale(
                output.mask, group_size=group_size
            )
    return dataclasses.replace(experience, **changed), stats


def staleness(rollout: Rollout, *, step: Array) -> masked.Stats:
    """How old the parameters that drew the tokens are.

    Returns:
      {name: (sum, weight)}: `policy/staleness`, step - version, mean over the response
      tokens, iterations, and `policy/staleness_max`, the largest; nothing where no
      version is known.
    """
    if rollout.version is None:
        return {}
    # i32[B, S] - i32[]: versions are by token.
    age = (step - rollout.version).astype(jnp.float32)
    mask = rollout.response_mask
    oldest = jnp.max(age, where=mask, initial=0.0)
    return masked.sum_stats({"policy/staleness": age}, mask=mask) | {
        "policy/staleness_max": (oldest, None)
    }
