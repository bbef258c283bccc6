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
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder, heads
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import adapted
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.text import Responses
from rlhf_jax.roles.rewards.text import TextReward as TextReward

Array = jax.Array
Params = Any


@flax.struct.dataclass
class Scores:
    """What a reward says of a batch, and what that is made of."""

    total: Array  # f32[B], reward units, one a response; what is maximised
    # f32[B] each, in units of their own, by their names in the metrics.
    parts: dict[str, Array] = flax.struct.field(default_factory=dict)


Reward = Callable[[Any], Array | Scores]  # of `Responses`


def scores_of(returned: Array | Scores) -> Scores:
    """What any reward returned, as a record: bare numbers have no parts."""
    return returned if isinstance(returned, Scores) else Scores(total=returned)


def part_stats(scores: Scores) -> masked.Stats:
    """{"reward/NAME": (sum, weight)}, the mean of each part over the responses."""
    return {
        f"reward/{name}": (
            jnp.asarray(part).sum(),
            jnp.asarray(jnp.size(part), jnp.float32),
        )
        for name, part in scores.parts.items()
    }


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
      those of a part are named for it, as in "correct/failed".

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
        parts: dict[str, Array] = {}
        for name, scores in scored.items():
            parts[name] = scores.total
            parts |= {f"{name}/{part}": of for part, of in scores.parts.items()}
        return Scores(total=jnp.asarray(total, jnp.float32), parts=parts)


def init(key: Array, trunk: Params, *, model: ModelConfig) -> Params:
    """Reward-model parameters: a copy of a decoder's trunk under a fresh head.

    Args:
      key: key[], draws the head.
      trunk: the decoder's parameters, usually after SFT; a head is not read.

    Returns:
      {"trunk": ..., "score": {"kernel": [D], "bias": []}}, as in `critic.py`.
    """
    kept = {name: trunk[name] for name in ("embed", "layers", "final_norm")}
    return {
        "trunk": storage.store(kept),
        "score": heads.init_score(key, model=model),
    }


def from_base(key: Array, *, model: ModelConfig, lora: LoRA) -> Params:
    """Reward-model parameters over a base: adapters that change nothing, a fresh head.

    Args:
      key: key[], draws the adapters and the head.

    Returns:
      {"trunk": adapters, "score": ...}, to be run with its base (`adapted.params`).

    Raises:
      InputError: as `lora.targets`.
    """
    trunk_key, score_key = jax.random.split(key)
    return {
        "trunk": adapted.init(trunk_key, model=model, lora=lora),
        "score": heads.init_score(score_key, model=model),
    }


def sequence_scores(
    params: Params, *, model: ModelConfig, tokens: Array, mask: Array
) -> Array:
    """score(x, y) = head(hidden state of the last token that is not padding).

    Args:
      params: {"trunk": ..., "score": {"kernel": [D], "bias": []}}.
      tokens: i32[B, S], prompt and response, padded on either side.
      mask: bool[B, S], True at tokens.

    Returns:
      f32[B], reward units.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4.
    """
    hidden = decoder.hidden_states(
        params["trunk"], model=model, tokens=tokens, mask=mask
    )
    last = tokens.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    final = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return heads.scores(params["score"], final)


def from_model(
    reference: Frozen,
    *,
    model: ModelConfig,
    base: Frozen | None = None,
    lora: LoRA | None = None,
) -> jax.tree_util.Partial:
    """A frozen reward model as `reward(rollout)`: a callable that is a pytree.

    Pass it to `jit` as an argument; its parameters then are arguments too.

    Args:
      reference: of its parameters, or of adapters and score over `base`.
      base, lora: with adapters, else None (`adapted.params`).
    """
    return jax.tree_util.Partial(_Scores(model, lora), reference, base)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Hashable by its options, so that equal reward models share one program."""

    model: ModelConfig
    lora: LoRA | None

    def __call__(
        self, reference: Frozen, base: Frozen | None, rollout: Responses
    ) -> Array:
        return sequence_scores(
            adapted.params(frozen.read(reference), base=base, lora=self.lora),
            model=self.model,
            tokens=rollout.tokens,
            mask=rollout.mask,
        )


def normalise(
    params: Params, *, scores: Array, mean: float = 0.0, std: float | None = 1.0
) -> Params:
    """Folds gain and bias into the head so that `scores` get the mean and std given.

    Args:
      params: reward-model parameters.
      scores: f32[N], what this model says of samples of the reference (OAI), or of
        demonstrations, whose mean alone is moved (N+).
      mean: wanted, reward units.
      std: wanted, reward units; None keeps the spread and moves the bias alone.

    Returns:
      The parameters with another head; the trunk is shared, not copied.

    Raises:
      InputError: the scores are not finite, or do not vary, so that no gain can help.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.1; the bias alone is Huang
    et al. 2024, arXiv:2403.17031.
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
    """Of equal scores the number itself, and 0."""
    scores = jnp.asarray(scores, jnp.float32)
    everything = jnp.ones(scores.shape, bool)
    variance = masked.masked_var(scores, mask=everything)
    return masked.masked_mean(scores, mask=everything), jnp.sqrt(variance)


@flax.struct.dataclass
class RunningMoments:
    """Mean and variance of every score seen so far. Part of every snapshot.

    Steps smaller than a digit of float32 would be lost: each has a rest of its own,
    what its rounding left out so far (Kahan's compensated sum).
    """

    count: Array  # f32[], scores
    mean: Array  # f32[], reward units
    mean_rest: Array  # f32[], reward units, to be added to the mean
    variance: Array  # f32[], reward units²
    variance_rest: Array  # f32[], reward units², to be added to the variance


def no_moments() -> RunningMoments:
    """Nothing seen yet; a function, since a shared array would die by donation."""
    return RunningMoments(
        count=jnp.zeros((), jnp.float32),
        mean=jnp.zeros((), jnp.float32),
        mean_rest=jnp.zeros((), jnp.float32),
        variance=jnp.zeros((), jnp.float32),
        variance_rest=jnp.zeros((), jnp.float32),
    )


def update_moments(moments: RunningMoments, scores: Array) -> RunningMoments:
    """Moments of the scores seen before and of these together.

    Args:
      scores: f32[B], reward units; those that are not finite are left out, since a NaN
        would stay for the rest of the run.

    Source: Chan, Golub & LeVeque 1979, the pairwise update; the exact error of a sum is
    Knuth, The Art of Computer Programming, volume 2, section 4.2.2.
    """
    finite = jnp.isfinite(scores)
    size = finite.sum(dtype=jnp.float32)
    count = moments.count + size
    share = size / jnp.maximum(count, 1.0)
    centre, rest, _ = masked.centred(scores, mask=finite)
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
    """left + right as rounded, and what the rounding has left out."""
    total = left + right
    of_right = total - left
    return total, (left - (total - of_right)) + (right - of_right)
