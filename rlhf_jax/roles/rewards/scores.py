"""Rewards: anything that maps a rollout to one score a response.

    reward(rollout) -> f32[B], reward units, or Scores

A trained reward model, a JAX function of tokens and a Python function of decoded texts
all have this shape, so that swapping one for another is one line. The first two are
pytrees or plain functions and run inside `jit`; `TextReward` runs on the host between
two programs. `weighted` adds several up and names them in the metrics:

    reward = rewards.weighted({"correct": (1.0, verified), "liked": (0.5, modelled)})
    scores = rewards.scores_of(reward(rollout))     Scores, whatever the reward returns
    stats |= rewards.part_stats(scores)             reward/correct, reward/liked

Running normalisation, clipping, a charge for length and what a missing stop costs act
on the total and come later (`algorithms/flow/shaping.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError

Array = jax.Array


@flax.struct.dataclass
class Scores:
    """What a reward says of a batch, and what that is made of."""

    total: Array  # f32[B], reward units, one a response; what is maximised
    # f32[B] each, in units of their own, by their names in the metrics.
    parts: dict[str, Array] = flax.struct.field(default_factory=dict)
    # f32[B, S], reward units, of episodes of several turns: the rewards of the turns
    # before the last, each at its turn's last sampled token, else 0. They are part of
    # `total`, whose rest lands at the episode's last token. None: one turn.
    turns: Array | None = None
    # bool[B, S], the last sampled token of every turn, the last turn's too. None where
    # nobody says: a turn that observes nothing ends where the next one begins.
    turn_ends: Array | None = None
    # bool[B], responses without a score: what was to give one failed, or their episode
    # never began. They are in no loss, baseline, group or mean. None: all have scores.
    left_out: Array | None = None


Reward = Callable[[Any], Array | Scores]  # of `Responses`


def scores_of(returned: Array | Scores, *, rows: int | None = None) -> Scores:
    """What any reward returned, as a record: bare numbers have no parts.

    Raises:
      InputError: they are not one number a row, turns are not [B, S], or `left_out` is
        not one bool a row.
    """
    scores = returned if isinstance(returned, Scores) else Scores(total=returned)
    total, turns, left_out = scores.total, scores.turns, scores.left_out
    wrong, expected = None, ""
    if rows is not None and total.shape != (rows,):
        wrong, expected = total, f"the reward to return {rows} numbers, one a response"
    elif turns is not None and (turns.ndim != 2 or turns.shape[:1] != total.shape):
        wrong, expected = (
            turns,
            (
                f"the rewards of turns as f32[B, S] beside {total.shape} totals, one "
                f"at each turn's last sampled token"
            ),
        )
    elif (ends := scores.turn_ends) is not None and (
        ends.ndim != 2 or ends.shape[:1] != total.shape or ends.dtype != bool
    ):
        wrong = ends
        expected = f"turn_ends as bool[B, S] beside {total.shape} totals"
    elif left_out is not None and (
        left_out.shape != total.shape or left_out.dtype != bool
    ):
        wrong = left_out
        expected = f"left_out as bool{list(total.shape)}, one a response"
    if wrong is not None:
        raise InputError(
            f"expected {expected}, got {wrong.dtype} of shape {wrong.shape}"
        )
    return scores


def part_stats(scores: Scores) -> masked.Stats:
    """{"reward/NAME": (sum, weight)}, the mean of each part over the responses.

    That of a part NAME with a part "NAME/left_out" is over the responses that NAME has
    scored. `reward/left_out`: share of responses without a score.
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
            part = jnp.where(out, 0.0, part)
        stats[f"reward/{name}"] = part.sum(), weight
    return stats


def weighted(parts: Mapping[str, tuple[float, Reward]]) -> jax.tree_util.Partial:
    """Σ_k w_k · reward_k, as a reward whose parts are named.

    A pytree of the rewards in it: pass it to `jit` as an argument where all of them are
    pytrees (`from_model`, or a function in a `jax.tree_util.Partial`), close over it
    where all run inside `jit`, and call it between two programs where one of them runs
    on the host.

    Args:
      parts: {name: (weight, reward)}; with weight 0.0 a part is logged and counts
        nothing.

    Returns:
      rollout -> Scores. `parts` are the rewards as they come, before their weights;
      those of a part are named for it, as in "correct/failed". A response that a reward
      with a weight leaves out is left out.

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
    """Hashable by its weights, so that equal sums share one program."""

    weights: tuple[tuple[str, float], ...]

    def __call__(self, *rewards_and_rollout: Any) -> Scores:
        *rewards, rollout = rewards_and_rollout
        scored = {
            name: scores_of(reward(rollout))
            for (name, _), reward in zip(self.weights, rewards, strict=True)
        }
        checks.same_shape(**{name: scores.total for name, scores in scored.items()})
        # A weight of 0 leaves out what is not finite, too.
        total = sum(
            (weight * scored[name].total for name, weight in self.weights if weight),
            start=jnp.zeros_like(next(iter(scored.values())).total),
        )
        of_turns = [
            weight * turns
            for name, weight in self.weights
            if weight and (turns := scored[name].turns) is not None
        ]
        # Of all that say so: a turn of one reward is a turn of the episode.
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
            turns=sum(of_turns[1:], start=of_turns[0]) if of_turns else None,
            turn_ends=functools.reduce(jnp.logical_or, ends) if ends else None,
            left_out=functools.reduce(jnp.logical_or, left_out) if left_out else None,
        )
