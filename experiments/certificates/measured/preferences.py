"""Expected losses of preferences in an enumerated world.

The policy is a table of 256 logits, one per response. A loss is summed over all ordered
pairs of responses (or all labelled responses), weighted by their probabilities, so that
nothing is sampled and training shows the optimum of the loss.

    clean     P(i beats j) = σ(r_i - r_j), Bradley and Terry
    flipped   (1-ε)·P + ε·(1-P), each label flipped with probability ε

The losses are the library's; the formulas to compare with are implemented here in
float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
from worlds import enumerable
from worlds.enumerable import Float64, World

from rlhf_jax import losses

Array = jax.Array
# log π f32[256] of all responses -> the expected loss, f32[].
Expected = Callable[[Array], Array]

STEPS = 2000
LEARNING_RATE = 0.05  # initial rate of Adam; falls to a thousandth


def clean(rewards: Float64) -> Float64:
    """f64[256, 256]: P(i beats j)."""
    return 1 / (1 + np.exp(rewards[None, :] - rewards[:, None]))


def flipped(preference: Float64, rate: float) -> Float64:
    """The probabilities after each label is flipped with probability `rate`."""
    return (1 - rate) * preference + rate * (1 - preference)


def of_pairs(
    pair_loss: Callable[[Array, Array], Any], preference: Float64, read: Any
) -> Expected:
    """The mean of a loss over all pairs of different responses.

    Args:
      pair_loss: (chosen, rejected) -> (loss, stats): the loss of one pair, from the
        rows of `read` for its two responses.
      preference: f64[256, 256], the probability that the first is labelled better.
      read: log π f32[256] -> the inputs of the loss for each response, f32[256, ...].
    """
    count = len(preference)
    others = ~np.eye(count, dtype=bool)
    weights = np.where(others, preference, 0.0) / (count * (count - 1) / 2)
    weights = jnp.asarray(weights, jnp.float32)

    def expected(log_policy: Array) -> Array:
        def one(chosen: Array, rejected: Array) -> Array:
            return pair_loss(chosen, rejected)[0]

        losses = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
        known = read(log_policy)
        return jnp.sum(jnp.sum(weights * losses(known, known), axis=1))

    return expected


def dpo(world: World, preference: Float64, *, beta: float, **options: Any) -> Expected:
    """`losses.dpo_loss` of any kind, in expectation over the labels."""
    log_ref = jnp.asarray(world.log_ref, jnp.float32)

    def pair_loss(chosen: Array, rejected: Array) -> Any:
        return losses.dpo_loss(
            chosen_logprobs=chosen[:1],
            rejected_logprobs=rejected[:1],
            ref_chosen_logprobs=chosen[1:],
            ref_rejected_logprobs=rejected[1:],
            beta=beta,
            **options,
        )

    def read(log_policy: Array) -> Array:
        return jnp.stack([log_policy, log_ref], axis=1)

    return of_pairs(pair_loss, preference, read)


def simpo(world: World, *, beta: float) -> Expected:
    """`losses.simpo_loss` without a margin: every response has 4 tokens."""

    def pair_loss(chosen: Array, rejected: Array) -> Any:
        return losses.simpo_loss(
            chosen_logprobs=chosen, rejected_logprobs=rejected, beta=beta
        )

    def read(log_policy: Array) -> Array:
        return log_policy[:, None] / enumerable.LENGTH

    return of_pairs(pair_loss, clean(world.rewards), read)


def simpo_optimum(world: World, *, beta: float) -> Float64:
    """log π of SimPO's minimum where all lengths are L: π ∝ exp(L·r/β)."""
    tilted = enumerable.LENGTH * world.rewards / beta
    return tilted - np.logaddexp.reduce(tilted)


def desirable(world: World) -> Float64:
    """f64[256]: the probability of the label desirable, σ(r - median r)."""
    return 1 / (1 + np.exp(np.median(world.rewards) - world.rewards))


def kto(world: World, *, beta: float) -> Expected:
    """The mean of `losses.kto_loss` over all responses, each with the same z0.

    z0 is the mean of log π/π_ref over all responses, as if those to other prompts were
    drawn uniformly.
    """
    log_ref = jnp.asarray(world.log_ref, jnp.float32)
    chance = jnp.asarray(desirable(world), jnp.float32)

    def expected(log_policy: Array) -> Array:
        kl = losses.kto_kl(logprobs=log_policy, ref_logprobs=log_ref)

        def one(label: bool) -> Array:
            of = jax.vmap(
                lambda logprob, ref: losses.kto_loss(
                    logprobs=logprob[None],
                    ref_logprobs=ref[None],
                    desirable=jnp.array([label]),
                    kl=kl,
                    beta=beta,
                )[0]
            )
            return of(log_policy, log_ref)

        return jnp.mean(chance * one(True) + (1 - chance) * one(False))

    return expected


def kto_gradient(world: World, log_policy: Float64, *, beta: float) -> Float64:
    """Gradient f64[256] in log π, by KTO's formula: -β·s(1-s)·(p - (1-p)) / 256."""
    ratio = log_policy - world.log_ref
    z0 = max(0.0, float(ratio.mean()))
    s = 1 / (1 + np.exp(-beta * (ratio - z0)))
    chance = desirable(world)
    return -beta * s * (1 - s) * (2 * chance - 1) / len(ratio)


def dpo_gradient(
    world: World, log_policy: Float64, preference: Float64, *, beta: float
) -> Float64:
    """Gradient f64[256] in log π of DPO on these labels: Σ_j β(σ(βh) - P) / pairs."""
    ratio = log_policy - world.log_ref
    probability = 1 / (1 + np.exp(-beta * (ratio[:, None] - ratio[None, :])))
    count = len(ratio)
    return beta * (probability - preference).sum(axis=1) / (count * (count - 1) / 2)


def dpo_optimum(world: World, preference: Float64, *, beta: float) -> Float64:
    """log π that minimises DPO's loss on these labels, a convex problem, in float64."""

    def value(log_ratio: Float64) -> tuple[float, Float64]:
        margin = beta * (log_ratio[:, None] - log_ratio[None, :])
        loss = (preference * np.logaddexp(0, -margin)).sum()
        probability = 1 / (1 + np.exp(-margin))
        return float(loss), beta * (probability - preference).sum(axis=1)

    solution = scipy.optimize.minimize(
        value,
        np.zeros(len(preference)),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-10},
    )
    tilted = world.log_ref + solution.x
    return tilted - np.logaddexp.reduce(tilted)


def gradient(expected: Expected, log_policy: Float64) -> Float64:
    """Gradient f64[256] of an expected loss in log π."""
    slope = jax.jit(jax.grad(expected))(jnp.asarray(log_policy, jnp.float32))
    return np.asarray(slope, np.float64)


def reach(expected: Expected, world: World, *, steps: int = STEPS) -> Float64:
    """f64[256]: log π, nats, after `steps` of Adam from the reference."""
    optimizer = optax.adam(
        optax.exponential_decay(LEARNING_RATE, steps, 1e-3), eps=1e-12
    )
    logits = _train(
        jnp.asarray(world.log_ref, jnp.float32),
        expected=expected,
        optimizer=optimizer,
        steps=steps,
    )
    logits = np.asarray(logits, np.float64)
    return logits - np.logaddexp.reduce(logits)


@functools.partial(jax.jit, static_argnames=("expected", "optimizer", "steps"))
def _train(
    logits: Array,
    *,
    expected: Expected,
    optimizer: optax.GradientTransformation,
    steps: int,
) -> Array:
    slope_of = jax.grad(lambda logits: expected(jax.nn.log_softmax(logits)))

    def step(carry: Any, _: None) -> tuple[Any, None]:
        logits, opt = carry
        updates, opt = optimizer.update(slope_of(logits), opt, logits)
        return (optax.apply_updates(logits, updates), opt), None

    (logits, _), _ = jax.lax.scan(
        step, (logits, optimizer.init(logits)), None, length=steps
    )
    return logits


def mixed(log_policy: Float64, log_ref: Float64, *, share: float) -> Float64:
    """log of the product of each token's mixture π^(1-m)·π_ref^m, normalised.

    The distribution of a token is computed from sums over responses with its prefix.
    """
    shape = (enumerable.VOCABULARY,) * enumerable.LENGTH
    total = np.zeros(shape)
    for column in range(enumerable.LENGTH):
        later = tuple(range(column + 1, enumerable.LENGTH))

        def conditional(log_p: Float64, later: tuple[int, ...] = later) -> Float64:
            known = np.logaddexp.reduce(log_p.reshape(shape), axis=later, keepdims=True)
            return known - np.logaddexp.reduce(
                known, axis=enumerable.LENGTH - 1 - len(later), keepdims=True
            )

        mix = (1 - share) * conditional(log_policy) + share * conditional(log_ref)
        mix -= np.logaddexp.reduce(mix, axis=column, keepdims=True)
        total = total + mix
    return total.reshape(-1)


def nash(world: World, *, tau: float, share: float) -> Float64:
    """log π of Nash-MD's fixed point: π ∝ π_ref exp(P(y beats π^mix)/τ)."""
    log_policy, beats = world.log_ref, clean(world.rewards)
    for _ in range(2000):
        mix = np.exp(mixed(log_policy, world.log_ref, share=share))
        best = world.log_ref + beats @ mix / tau
        best -= np.logaddexp.reduce(best)
        log_policy = 0.5 * log_policy + 0.5 * best
        log_policy -= np.logaddexp.reduce(log_policy)
    return log_policy
