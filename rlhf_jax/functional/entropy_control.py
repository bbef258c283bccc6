"""Control of the entropy bonus: a coefficient that keeps the entropy at a target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from rlhf_jax.functional import checks

Array = jax.Array


def controlled(
    coef: Float32[Array, ""],
    *,
    entropy: Float32[Array, ""],
    target: checks.Scalar,
    increment: checks.Scalar,
    largest: checks.Scalar,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """(α, c') with α = c where H <= target, else 0; c' = c + Δ there, else c - Δ.

    Args:
      coef: c, f32[], reward units per nat.
      entropy: H, f32[], nats per token, of the policy that drew the batch. Where it is
        NaN (the mean of no tokens), c does not change and α is 0.
      target: nats per token.
      increment: Δ, reward units per nat.
      largest: upper bound of c', reward units per nat; the lower bound is 0.

    Returns:
      f32[] α of this iteration and c' of the next one. Nothing has a gradient.

    Source: He et al. 2025 (Skywork-OR1), arXiv:2505.22312, adaptive entropy control;
    the bounds are those of TRL's `use_adaptive_entropy`.

    >>> options = {"target": 0.2, "increment": 0.005, "largest": 1.0}
    >>> coef, low, high = (jnp.float32(x) for x in (0.01, 0.1, 0.3))
    >>> print(*controlled(coef, entropy=low, **options))
    0.01 0.015
    >>> print(*controlled(coef, entropy=high, **options))
    0.0 0.005
    """
    checks.shape((), coef=coef, entropy=entropy)
    checks.float32(coef=coef, entropy=entropy)
    checks.positive(target=target, increment=increment, largest=largest)
    coef, entropy = jax.lax.stop_gradient((coef, entropy))
    collapsed = entropy <= target
    moved = jnp.clip(coef + jnp.where(collapsed, increment, -increment), 0.0, largest)
    moved = jnp.where(jnp.isnan(entropy), coef, moved)
    return jax.lax.stop_gradient((jnp.where(collapsed, coef, 0.0), moved))
