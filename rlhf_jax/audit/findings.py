"""Findings: the expected gradient of a loss compared with every target and world."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rlhf_jax.audit import expected, worlds
from rlhf_jax.audit.expected import REWARD, Batch, Loss
from rlhf_jax.audit.worlds import GROUP, LENGTH, VOCABULARY, World
from rlhf_jax.functional.kl.gradients import FULL_REVERSE

Array = jax.Array
Float64 = npt.NDArray[np.float64]

ZERO, NONE = "zero", "none of these"
# Float32 sums over 19,683 groups are within 1e-5; targets are at least 1e-2 apart.
TOLERANCE = 1e-4
LOG_RATIOS = (-1000.0, -100.0, -20.0, 20.0, 100.0, 1000.0)  # nats


class Fit(NamedTuple):
    """A least-squares fit of a gradient by a target: g ≈ scale·target.

    With rewards g ≈ scale·target + reward·(-∇ E[r]), and β = scale / reward.
    """

    scale: float
    cosine: float  # between the target and g without the reward's part
    distance: float  # ‖residual‖ / ‖g‖
    beta: float | None = None  # reward units per nat; None where the reward has no part


class Finding(NamedTuple):
    """The result of an audit in one world."""

    world: str
    norm: float  # ‖g‖ / ‖∇ full reverse‖
    fits: Mapping[str, Fit]  # by target; the reward is a target only with rewards
    verdict: str  # a target, "minus " and a target, `ZERO` or `NONE`
    nearest: str  # the target with the smallest distance
    by_depth: tuple[float, ...]  # scale of `nearest` at each column, relative to 0


def of_loss(
    loss: Loss, *, with_rewards: bool = False, seed: int = 0
) -> tuple[Finding, ...]:
    """Audits a loss in each world.

    Args:
      loss: Batch -> f32[], a function of JAX arrays (`from_torch` makes one).
      with_rewards: use the world's rewards; else they are 0, and the gradient is the
        penalty's alone.
      seed: seed of the worlds.
    """
    return tuple(
        of_gradient(
            expected.expected_gradient(loss, world, with_rewards=with_rewards),
            world=world,
            with_rewards=with_rewards,
        )
        for world in worlds.every(seed)
    )


def of_gradient(
    gradient: Array, *, world: World, with_rewards: bool = False
) -> Finding:
    """Compares an expected gradient, f32[states, V], with the targets of its world.

    Raises:
      ValueError: the shape is that of another world.
    """
    if jnp.shape(gradient) != world.policy.shape:
        raise ValueError(
            f"expected the gradient of {world.name!r}, f32{list(world.policy.shape)}, "
            f"got {list(jnp.shape(gradient))}; pass the gradient's own world"
        )
    targets = {
        name: np.asarray(target, np.float64)
        for name, target in expected.targets(world).items()
    }
    measured = np.asarray(gradient, np.float64)
    norm = float(np.linalg.norm(measured) / np.linalg.norm(targets[FULL_REVERSE]))
    reward = targets[REWARD] if with_rewards else None
    fits = {
        name: _fit(measured, target, beside=None if name == REWARD else reward)
        for name, target in targets.items()
        if with_rewards or name != REWARD  # without rewards a match would be chance
    }
    nearest = min(fits, key=lambda name: fits[name].distance)
    if with_rewards and fits[REWARD].distance <= TOLERANCE:
        nearest = REWARD  # any KL fits it too, with β = 0
    verdict = NONE
    if fits[nearest].distance <= TOLERANCE:  # however small: β may be part of the loss
        verdict = nearest if fits[nearest].scale > 0 else f"minus {nearest}"
    elif norm <= TOLERANCE:
        verdict = ZERO
    scales = []
    for depth in range(world.depths.max() + 1):
        at = world.depths == depth
        if at.any():  # the environment's column has no state of the policy
            of_depth = None if reward is None or nearest == REWARD else reward[at]
            fit = _fit(measured[at], targets[nearest][at], beside=of_depth)
            scales.append(fit.scale)
    by_depth = tuple(scale / scales[0] if scales[0] else 0.0 for scale in scales)
    return Finding(world.name, norm, fits, verdict, nearest, by_depth)


def by_length(loss: Loss) -> dict[int, float]:
    """{length: weight of a response's first token}, relative to the largest length.

    In a group of three the first response has this length and the others the largest;
    all tokens have the same log-probs. 1 at every length is a sum over tokens; 3, 1.5,
    1 divides each response by its own length. NaN: the loss has no gradient there.
    """
    weights = {
        length: _size(loss, example(length))[0, 0] for length in range(1, LENGTH + 1)
    }
    longest = weights[LENGTH]
    return {
        length: float(weight / longest) if longest else math.nan
        for length, weight in weights.items()
    }


def by_log_ratio(loss: Loss) -> dict[str, dict[float, float]]:
    """{name: {nats: largest slope in a log-prob}}, inf or NaN where it blows up.

    "reference" varies log π - log π_ref at π = π_old; "sampler" varies
    log π - log π_old at log π - log π_ref = 0.5.
    """
    return {
        "reference": {
            nats: float(_size(loss, example(reference=-1 - nats)).max())
            for nats in LOG_RATIOS
        },
        "sampler": {
            nats: float(_size(loss, example(old=-1 - nats)).max())
            for nats in LOG_RATIOS
        },
    }


def example(
    length: int = LENGTH, *, reference: float = -1.5, old: float = -1.0
) -> Batch:
    """A group of equal tokens with log-prob -1, whose first response has this length.

    Args:
      reference, old: the log-probs of the reference and of the sampler, nats.
    """
    lengths = np.array([length] + [LENGTH] * (GROUP - 1))
    mask = jnp.asarray(np.arange(LENGTH) < lengths[:, None])
    logits = jnp.zeros((*mask.shape, VOCABULARY), jnp.float32)

    def filled(nats: float) -> Array:
        return jnp.where(mask, jnp.float32(nats), 0.0)

    return Batch(
        logprobs=filled(-1.0),
        old_logprobs=filled(old),
        ref_logprobs=filled(reference),
        mask=mask,
        rewards=jnp.zeros(GROUP, jnp.float32),
        logits=logits.at[..., 0].set(1.0),
        ref_logits=logits.at[..., 1].set(1.0),
    )


def _size(loss: Loss, batch: Batch) -> Float64:
    """[G, T]: norm of the gradient with respect to a token's log-prob and logits."""

    def of(logprobs: Array, logits: Array) -> Array:
        return loss(batch._replace(logprobs=logprobs, logits=logits))

    by_logprob, by_logits = jax.grad(of, argnums=(0, 1))(batch.logprobs, batch.logits)
    together = jnp.concatenate([by_logprob[..., None], by_logits], axis=-1)
    return np.linalg.norm(np.asarray(together, np.float64), axis=-1)


def _fit(measured: Float64, target: Float64, *, beside: Float64 | None) -> Fit:
    columns = [one.ravel() for one in (target, beside) if one is not None]
    flat, norm = measured.ravel(), np.linalg.norm(measured)
    if not np.isfinite(norm) or norm == 0:
        return Fit(0.0, 0.0, 1.0)
    factors, *_ = np.linalg.lstsq(np.stack(columns, axis=1), flat)
    others = sum(
        factor * one for factor, one in zip(factors[1:], columns[1:], strict=True)
    )
    rest = flat - others
    size = np.linalg.norm(rest) * np.linalg.norm(target)
    rewarded = np.linalg.norm(others) > TOLERANCE * norm
    return Fit(
        scale=float(factors[0]),
        cosine=float(rest @ columns[0] / size) if size else 0.0,
        distance=float(np.linalg.norm(rest - factors[0] * columns[0]) / norm),
        beta=float(factors[0] / factors[1]) if rewarded else None,
    )
