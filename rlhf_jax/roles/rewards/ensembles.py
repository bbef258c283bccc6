"""Reward ensembles: combine several rewards of a response, and measure disagreement.

    combine          reward of a response, from r_1 ... r_M of the members
    mean             mean(r)
    minimum          min(r), the worst case
    mean_minus_std   mean(r) - c·std(r)
    entropic         -τ·log mean(exp(-r/τ)), between the minimum and the mean

Members agree on their training data. A policy that leaves it finds responses that one
of them overrates; the minimum, or a penalty for disagreement, rewards these less.
Members must have one scale: give each mean 0 and the same standard deviation on the
same samples (`rewards.normalise`, `rlhf-jax reward-model`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.roles.rewards.scores import Combine, Reward, Scores, scores_of

Array = jax.Array


def combine(
    scores: Sequence[Array],
    *,
    how: Combine,
    std_coef: float | None = None,
    risk: float | None = None,
) -> Scores:
    """Combines the scores of M members into one score per response.

    Args:
      scores: f32[B] each, reward units, of at least two members.
      std_coef: c of mean_minus_std, dimensionless; None is 1. The standard deviation is
        over the members, with ddof 0.
      risk: τ of entropic, reward units, > 0; None is 1. Smaller is nearer to the
        minimum: entropic is the minimum over weights w of the members of
        Σ w·r + τ·KL(w ‖ equal weights).

    Returns:
      Scores, with the parts "member_0", ..., reward units, and "disagreement", the
      standard deviation over the members for each response, reward units.

    Raises:
      InputError: fewer than two members, an unknown `how`, or an option that it does
        not read.

    Source: Coste et al. 2024, arXiv:2310.02743, section 3: mean and minimum (worst
    case); their third subtracts a variance instead of a standard deviation. entropic:
    Hahami et al. 2026, arXiv:2606.09073, whose τ is β of the KL penalty.
    """
    _check(len(scores), how=how, std_coef=std_coef, risk=risk)
    checks.same_shape(**{f"member_{i}": member for i, member in enumerate(scores)})
    members = jnp.stack([jnp.asarray(member, jnp.float32) for member in scores])
    mean = members.mean(axis=0)
    # Relative to the first: equal members disagree by 0, however the mean is rounded.
    apart = members - members[:1]
    spread = jnp.sqrt(jnp.mean(jnp.square(apart - apart.mean(axis=0)[None]), axis=0))
    match how:
        case "mean":
            total = mean
        case "minimum":
            total = members.min(axis=0)
        case "mean_minus_std":
            std_coef = 1.0 if std_coef is None else std_coef
            total = mean - std_coef * spread
        case "entropic":
            # Relative to the least member: no exponential overflows, and with a large τ
            # nothing is rounded at the scale of τ.
            risk = 1.0 if risk is None else risk
            least = members.min(axis=0)
            above = jnp.expm1((least[None] - members) / risk).mean(axis=0)
            total = least - risk * jnp.log1p(above)
    parts = {f"member_{i}": member for i, member in enumerate(members)}
    return Scores(total=total, parts=parts | {"disagreement": spread})


def ensemble(
    members: Sequence[Reward],
    *,
    how: Combine,
    std_coef: float | None = None,
    risk: float | None = None,
) -> jax.tree_util.Partial:
    """Several rewards as one: `combine` of their scores of a rollout.

    A pytree of the members, like `weighted`: pass it to `jit` as an argument if all of
    them are pytrees (`from_model`, each with its own `Frozen`).

    Args:
      members: rewards, at least two; the total of a member that returns `Scores`.
    """
    _check(len(members), how=how, std_coef=std_coef, risk=risk)
    options = _Ensemble(how, std_coef, risk)
    return jax.tree_util.Partial(options, *members)


def _check(
    members: int, *, how: Combine, std_coef: float | None, risk: float | None
) -> None:
    if members < 2:
        raise checks.InputError(
            f"expected at least 2 rewards to combine, got {members}; add another"
        )
    checks.one_of(how=how, among=get_args(Combine))
    checks.non_negative(std_coef=std_coef)
    checks.positive(risk=risk)
    expect_none(
        f"with how {how!r}, which does not read it",
        advice="leave it out, or choose another how",
        std_coef=None if how == "mean_minus_std" else std_coef,
        risk=None if how == "entropic" else risk,
    )


@dataclasses.dataclass(frozen=True)
class _Ensemble:
    """The call of an ensemble; hashable, so that equal ones share one program."""

    how: Combine
    std_coef: float | None
    risk: float | None

    def __call__(self, *members_and_rollout: Any) -> Scores:
        *members, rollout = members_and_rollout
        scores = [scores_of(member(rollout)).total for member in members]
        return combine(scores, how=self.how, std_coef=self.std_coef, risk=self.risk)
