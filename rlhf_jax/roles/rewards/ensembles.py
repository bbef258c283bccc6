"""Reward ensembles: several rewards of one response as one, and how far they differ.

    combine      r_1 ... r_M of each response -> what is maximised
    mean         mean(r)
    minimum      min(r), the worst case
    mean_minus_std   mean(r) - c·std(r)
    entropic         -τ·log mean(exp(-r/τ)), between the minimum and the mean

Where the members agree only on the data that they learned from, a policy that leaves it
finds responses that one of them overrates. The minimum, and a charge for disagreement,
pay less for those. Members must have one scale: give each mean 0 and the same standard
deviation on the same samples (`rewards.normalise`, `rlhf-jax reward-model`).
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
    """The scores of M members as one score per response.

    Args:
      scores: f32[B] each, reward units, of at least two members.
      std_coef: c of mean_minus_std alone, dimensionless, None is 1; the standard
        deviation is over the members, of ddof 0.
      risk: τ of entropic alone, reward units, above 0, None is 1: the less, the nearer
        to the minimum. It is min over weights w of the members of
        Σ w·r + τ·KL(w ‖ equal weights).

    Returns:
      Scores, whose parts are "member_0", ..., reward units, and "disagreement", the
      standard deviation over the members of each response, reward units.

    Source: Coste et al. 2024, arXiv:2310.02743, section 3: mean and minimum (worst
    case); where their third subtracts a variance, this subtracts a standard deviation.
    entropic: Hahami et al. 2026, arXiv:2606.09073, whose τ is β of the KL penalty.
    """
    _check(len(scores), how=how, std_coef=std_coef, risk=risk)
    checks.same_shape(**{f"member_{i}": member for i, member in enumerate(scores)})
    members = jnp.stack([jnp.asarray(member, jnp.float32) for member in scores])
    mean = members.mean(axis=0)
    # Around the first: equal members disagree by 0, however their mean is rounded.
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
            # Over the least member: no exponential overflows, and where τ is large
            # nothing is rounded at the size of τ.
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
    """Several rewards as one: `combine` of what each says of a rollout.

    A pytree of the members, as `weighted` is: pass it to `jit` as an argument where all
    of them are pytrees (`from_model`, each with a `Frozen` of its own).

    Args:
      members: rewards, at least two; of a member that returns `Scores` the total.
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
    """Hashable by its options, so that equal ensembles share one program."""

    how: Combine
    std_coef: float | None
    risk: float | None

    def __call__(self, *members_and_rollout: Any) -> Scores:
        *members, rollout = members_and_rollout
        scores = [scores_of(member(rollout)).total for member in members]
        return combine(scores, how=self.how, std_coef=self.std_coef, risk=self.risk)
