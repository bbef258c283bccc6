"""Gradient regularisation: flat optima in place of a KL to the reference.

    g₁ = ∇L(θ) ──> θ + ε·g₁ ──> g₂ = ∇L(θ + ε·g₁) ──> step along g₁ + (γ/ε)·(g₂ − g₁)

Both gradients are of the same minibatch: a step costs two forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms.policy_gradient.options import GradientPenalty

Params = Any


def penalised(
    gradient: Callable[[Params], Params],
    params: Params,
    grads: Params,
    *,
    penalty: GradientPenalty,
) -> Params:
    """g₁ + (γ/ε)·(∇L(θ + ε·g₁) − g₁), which is ∇(L + γ/2·‖∇L‖²) + O(ε).

    Args:
      gradient: θ -> ∇L(θ).
      params: θ, f32 leaves. A forward pass in bfloat16 rounds most of ε·g₁ away.
      grads: ∇L(θ); both gradients are clipped to `penalty.max_norm`.

    Returns:
      The gradient, of the structure of `params`.

    ‖∇L‖² is taken over the minibatch. Its expectation is that of the expected gradient
    plus the variance of the gradient, so noise is penalised too.

    Source: Ackermann et al. 2026, arXiv:2602.18037, with the forward difference and the
    clips of the authors' code (JohannesAck/gradientregularization_trl).

    >>> square = lambda x: x  # of L = x²/2: L + γ/2·x² has the gradient (1 + γ)·x
    >>> chosen = GradientPenalty(strength=0.5)
    >>> print(penalised(square, jnp.array(2.0), jnp.array(2.0), penalty=chosen))
    3.0
    """
    first = _clipped(grads, max_norm=penalty.max_norm)
    ahead = jax.tree.map(lambda x, g: x + penalty.step * g, params, first)
    second = _clipped(gradient(ahead), max_norm=penalty.max_norm)
    scale = penalty.strength / penalty.step
    return jax.tree.map(lambda g, other: g + scale * (other - g), first, second)


def _clipped(grads: Params, *, max_norm: float | None) -> Params:
    if max_norm is None:
        return grads
    norm = optax.tree.norm(grads)
    # A norm of 0 is below the bound, and is not a divisor.
    scale = jnp.where(norm > max_norm, max_norm / jnp.maximum(norm, max_norm), 1.0)
    return jax.tree.map(lambda g: scale * g, grads)
