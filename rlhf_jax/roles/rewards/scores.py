"""Rewards: functions from a rollout to one score per response.

    reward(rollout) -> f32[B], reward units, or Scores

A trained reward model, a JAX function of tokens and a Python function of decoded texts
all have this form, so that swapping one for another is one line. The first two are
pytrees or plain functions and run inside `jit`; `TextReward` runs on the host between
two programs. `weighted` sums several rewards and names them in the metrics:

    reward = rewards.weighted({"correct": (1.0, verified), "liked": (0.5, modelled)})
    scores = rewards.scores_of(reward(rollout))     Scores, whatever the reward returns
    stats |= rewards.part_stats(scores)             reward/correct, reward/liked

`normalise` gives a model scores of mean 0 and standard deviation 1 once;
`RunningMoments` are the moments of all scores so far. `algorithms/flow/shaping.py`
scales the total by them, clips it, and adds penalties for length and missing stops.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError

Array = jax.Array
Params = Any
Combine = Literal[
    "mean", "minimum", "mean_minus_std", "entropic"
]  # of `ensembles.combine`
# A response without a score is left out (`Scores.left_out`), scores 0, or ends the run.
OnFailure = Literal["leave_out", "zero", "stop"]


@flax.struct.dataclass
class Scores:
    """The scores of a batch, and their parts."""

    total: Array  # f32[B], reward units, one per response; what is maximised
    # {name in the metrics: f32[B]}, in units of their own.
    parts: dict[str, Array] = flax.struct.field(default_factory=dict)
    # f32[B, S], reward units, for episodes of several turns: the rewards of turns
    # before the last, at the last sampled token of the turn, else 0. They are part of
    # `total`, whose rest is given at the episode's last token. None: one turn.
    turns: Array | None = None
    # bool[B, S], True at the last sampled token of every turn, also the last turn. None
    # if unknown: tokens do not show where a turn without an observation ends.
    turn_ends: Array | None = None
    # bool[B], True for responses without a score: scoring failed, or their episode
    # never began. They are in no loss, baseline, group or mean. None: all have scores.
    left_out: Array | None = None
    # (name, weight) of the parts that `total` is the sum of; () if it is no such sum.
    weights: tuple[tuple[str, float], ...] = flax.struct.field(
        pytree_node=False, default=()
    )


Reward = Callable[[Any], Array | Scores]  # of `Responses`


def scores_of(returned: Array | Scores, *, rows: int | None = None) -> Scores:
    """Converts the result of any reward to `Scores`; a bare array has no parts.

    Args:
      rows: B, to check; None checks no number of rows.

    Raises:
      InputError: the total is not one number per row, turns or their ends are not
        [B, S], or `left_out` is not one bool per row.
    """
    scores = returned if isinstance(returned, Scores) else Scores(total=returned)
    total, turns, ends = scores.total, scores.turns, scores.turn_ends
    left_out, beside = scores.left_out, f"beside {scores.total.shape} totals"
    if rows is not None and total.shape != (rows,):
        raise _unlike(total, f"the reward to return {rows} numbers, one a response")
    if turns is not None and not _per_token(turns, total):
        raise _unlike(
            turns,
            f"the rewards of turns as f32[B, S] {beside}, one at each turn's last "
            f"sampled token",
        )
    if ends is not None and not (_per_token(ends, total) and ends.dtype == bool):
        raise _unlike(ends, f"turn_ends as bool[B, S] {beside}")
    if left_out is not None and (
        left_out.shape != total.shape or left_out.dtype != bool
    ):
        raise _unlike(left_out, f"left_out as bool{list(total.shape)}, one a response")
    return scores


def _per_token(x: Array, total: Array) -> bool:
    return x.ndim == 2 and x.shape[:1] == total.shape


def _unlike(x: Array, expected: str) -> InputError:
    return InputError(f"expected {expected}, got {x.dtype} of shape {x.shape}")


def part_stats(scores: Scores) -> masked.Stats:
    """{"reward/NAME": (sum, weight)}, the mean of each part over the responses.

    With a part "NAME/left_out", the mean of NAME is over the responses that NAME has
    scored. `reward/left_out` is the share of responses without a score.
    """
    parts = dict(scores.parts)
    if scores.left_out is not None:
        parts["left_out"] = scores.left_out
    stats: masked.Stats = {}
    for name, part in parts.items():
        part, count = jnp.asarray(part, jnp.float32), jnp.size(part)
        weight = jnp.asarray(count, jnp.float32)
        if (out := parts.get(f"{name}/left_out")) is not None:
            weight = weight - jnp.asarray(out, jnp.float32).sum()
            # A missing score may be NaN.
            part = jnp.where(out, 0.0, part)
        stats[f"reward/{name}"] = part.sum(), weight
    return stats


def weighted(parts: Mapping[str, tuple[float, Reward]]) -> jax.tree_util.Partial:
    """Σ_k w_k · reward_k, as a reward with named parts.

    A pytree of its rewards: pass it to `jit` as an argument if all of them are pytrees
    (`from_model`, or a function in a `jax.tree_util.Partial`), close over it if all run
    inside `jit`, and call it between two programs if one of them runs on the host.

    Args:
      parts: {name: (weight, reward)}; a part with weight 0.0 is only logged.

    Returns:
      rollout -> Scores. `parts` are the rewards before weighting; parts of a part have
      its name in front, as in "correct/failed". A response that a reward with a nonzero
      weight leaves out is left out.

    Raises:
      InputError: there are no parts, or a weight is not finite.
    """
    if not parts:
        raise checks.InputError("expected at least one reward to weigh, got none")
    weights = {name: float(weight) for name, (weight, _) in parts.items()}
    checks.finite(**{f"weight of {name!r}": w for name, w in weights.items()})
    sum_of = _WeightedSum(tuple(weights.items()))
    return jax.tree_util.Partial(sum_of, *(reward for _, reward in parts.values()))


@dataclasses.dataclass(frozen=True)
class _WeightedSum:
    """The call of a weighted sum; hashable, so that equal ones share one program."""

    weights: tuple[tuple[str, float], ...]

    def __call__(self, *rewards_and_rollout: Any) -> Scores:
        *rewards, rollout = rewards_and_rollout
        scored = {
            name: scores_of(reward(rollout))
            for (name, _), reward in zip(self.weights, rewards, strict=True)
        }
        checks.same_shape(**{name: scores.total for name, scores in scored.items()})
        # Skips weights of 0, as 0 times a score that is not finite is NaN.
        total = sum(
            (weight * scored[name].total for name, weight in self.weights if weight),
            start=jnp.zeros_like(next(iter(scored.values())).total),
        )
        of_turns = [
            weight * turns
            for name, weight in self.weights
            if weight and (turns := scored[name].turns) is not None
        ]
        # A turn that ends for one reward ends for the episode.
        ends = [s.turn_ends for s in scored.values() if s.turn_ends is not None]
        parts: dict[str, Array] = {}
        for name, scores in scored.items():
            parts[name] = scores.total
            parts |= {f"{name}/{part}": of for part, of in scores.parts.items()}
            if scores.left_out is not None:
                parts[f"{name}/left_out"] = jnp.asarray(scores.left_out)
        left_out = [
            parts[f"{name}/left_out"]
            for name, weight in self.weights
            if weight and scored[name].left_out is not None
        ]
        return Scores(
            total=jnp.asarray(total, jnp.float32),
            parts=parts,
            weights=self.weights,
            turns=sum(of_turns[1:], start=of_turns[0]) if of_turns else None,
            turn_ends=functools.reduce(jnp.logical_or, ends) if ends else None,
            left_out=functools.reduce(jnp.logical_or, left_out) if left_out else None,
        )


def normalise(
    params: Params, *, scores: Array, mean: float = 0.0, std: float | None = 1.0
) -> Params:
    """Folds a gain and a bias into the head that give `scores` a mean and a std.

    Args:
      scores: f32[N], this model's scores of samples of the reference (OAI), or of
        demonstrations, for which only the mean is moved (N+).
      mean: target, reward units.
      std: target, reward units; None keeps the spread and changes only the bias.

    Returns:
      The parameters with another head; the trunk is shared, not copied.

    Raises:
      InputError: the scores are not finite, or with `std` do not vary.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.1; only the bias, Huang et
    al. 2024, arXiv:2403.17031.
    """
    head = params["score"]
    if std is None:
        centre = float(_mean_and_std(scores)[0])
        if not math.isfinite(centre):
            raise InputError(
                f"expected finite scores to normalise by, got {scores.size} scores "
                f"with mean {centre}; is the reward model trained?"
            )
        return {**params, "score": {**head, "bias": head["bias"] + (mean - centre)}}
    centre, spread = map(float, _mean_and_std(scores))
    if not 0 < spread < math.inf:
        raise InputError(
            f"expected scores that vary to normalise by, got {scores.size} scores with "
            f"standard deviation {spread}; is the reward model trained?"
        )
    gain = std / spread
    bias = mean - gain * centre
    score = {"kernel": gain * head["kernel"], "bias": gain * head["bias"] + bias}
    return {**params, "score": score}


def _mean_and_std(scores: Array) -> tuple[Array, Array]:
    """Mean and standard deviation; exact for equal scores."""
    scores = jnp.asarray(scores, jnp.float32)
    everything = jnp.ones(scores.shape, bool)
    variance = masked.masked_var(scores, mask=everything)
    return masked.masked_mean(scores, mask=everything), jnp.sqrt(variance)


@flax.struct.dataclass
class RunningMoments:
    """Mean and variance of all scores so far. Part of every snapshot.

    Updates below the precision of float32 would be lost: each moment has a rest, the
    sum of its rounding errors so far (Kahan's compensated sum).
    """

    count: Array  # f32[], number of scores
    mean: Array  # f32[], reward units
    mean_rest: Array  # f32[], reward units, to be added to the mean
    variance: Array  # f32[], reward units²
    variance_rest: Array  # f32[], reward units², to be added to the variance


def no_moments() -> RunningMoments:
    """Moments of no scores; a function, as donation would destroy a shared array."""
    return RunningMoments(*(jnp.zeros((), jnp.float32) for _ in range(5)))


def update_moments(
    moments: RunningMoments, scores: Array, *, row_mask: Array | None = None
) -> RunningMoments:
    """The moments of earlier scores and of these together.

    Args:
      scores: f32[B], reward units; non-finite scores are left out, since a NaN would
        stay for the rest of the run.
      row_mask: bool[B], scores that count; None counts all.

    Source: Chan, Golub & LeVeque 1979, the pairwise update; the exact error of a sum is
    Knuth, The Art of Computer Programming, volume 2, section 4.2.2.
    """
    finite = jnp.isfinite(scores)
    if row_mask is not None:
        finite &= row_mask
    size = finite.sum(dtype=jnp.float32)
    count = moments.count + size
    share = size / jnp.maximum(count, 1.0)
    centre, rest, _ = masked.centred(scores, mask=finite)
    # Subtracts large parts first and rests after, which keeps the digits of the rests.
    delta = (centre - moments.mean) + (rest - moments.mean_rest)
    excess = masked.masked_var(scores, mask=finite) - moments.variance
    mean, mean_rest = _sum_in_two(moments.mean, moments.mean_rest + share * delta)
    variance, variance_rest = _sum_in_two(
        moments.variance,
        moments.variance_rest
        + share * (excess - moments.variance_rest + (1 - share) * delta**2),
    )
    return RunningMoments(
        count=count,
        mean=mean,
        mean_rest=mean_rest,
        variance=variance,
        variance_rest=variance_rest,
    )


def _sum_in_two(left: Array, right: Array) -> tuple[Array, Array]:
    """left + right in float32, and its rounding error."""
    total = left + right
    of_right = total - left
    return total, (left - (total - of_right)) + (right - of_right)
