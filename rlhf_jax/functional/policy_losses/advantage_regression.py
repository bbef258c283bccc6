"""DAR: a weighted log-likelihood in place of a policy gradient."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, masked, surrogates
from rlhf_jax.functional.aggregation import Mean, aggregate

Array = jax.Array
Scalar = checks.Scalar
Stats = masked.Stats


def dar_loss(
    *,
    logprobs: Float32[Array, "B S"],
    old_logprobs: Float32[Array, "B S"],
    ref_logprobs: Float32[Array, "B S"],
    advantages: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    beta: Scalar,
    share: Scalar,
    cap: Scalar,
    **mean: Unpack[Mean],
) -> tuple[Float32[Array, ""], Stats]:
    """DAR, the mean of -sg(w)·log π, w = min((π_ref/π_old)^α·exp(A/β), cap).

    (π_ref/π_old)^α is the ratio of the whole response, α the share. On samples of
    π_old, and with A equal to r up to a constant of the prompt, the minimum is at
    π ∝ π_ref^α·π_old^(1 - α)·exp(r/β). Its fixed point is π ∝ π_ref·exp(r/(αβ)).

    Args:
      old_logprobs, ref_logprobs: f32[B, S], nats, of the policy that sampled and of the
        reference.
      beta: β, reward units per nat, above 0; published 0.05.
      share: α, from 0 to 1, dimensionless; published 0.1.
      cap: largest weight, above 1; published 20.
      the others: as in `losses.policy_loss`.

    Returns:
      f32[] loss and {name: (sum, weight)}: the ratio statistics of `losses.policy_loss`
      over tokens, `policy/gate`: the mean of w, and `policy/clipfrac`: the share of
      tokens whose w is capped. The gradient reaches `logprobs` only.

    Source: He et al. 2026, arXiv:2602.11523, theorem 4.2 and the loss after it.

    >>> half = jnp.log(jnp.full((3, 1), 0.5))
    >>> arrays = {"old_logprobs": half, "mask": jnp.ones((3, 1), bool)}
    >>> arrays |= {"ref_logprobs": jnp.log(jnp.array([[0.5], [0.125], [0.5]]))}
    >>> arrays |= {"advantages": jnp.array([[0.0], [0.0], [9.0]])}
    >>> options = {"beta": 1.0, "share": 0.5, "cap": 20.0}
    >>> loss = lambda x: dar_loss(logprobs=x, **arrays, **options)[0]
    >>> print(jax.grad(loss)(half)[:, 0] * 3)
    [ -1.   -0.5 -20. ]
    >>> _, stats = dar_loss(logprobs=half, **arrays, **options)
    >>> capped, tokens = stats["policy/clipfrac"]
    >>> print(f"{capped / tokens:.2f}")
    0.33
    """
    checks.positive(beta=beta)
    checks.fraction(share=share)
    checks.within(above=1, advice="published is 20", cap=cap)
    checks.masked_floats(mask, ref_logprobs=ref_logprobs)
    log_ratio, advantages = surrogates.masked_inputs(
        logprobs, old_logprobs, advantages, mask
    )
    checks.shape((None, None), mask=mask)
    back = jnp.where(mask, ref_logprobs, 0.0) - jnp.where(mask, old_logprobs, 0.0)
    log_weight = share * back.sum(axis=1, keepdims=True) + advantages / beta
    # Capped in logs, as exp may overflow.
    most = jnp.log(cap)
    weight = jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_weight, most)))
    loss, stats = aggregate(
        "loss/policy", -weight * jnp.where(mask, logprobs, 0.0), mask, **mean
    )
    capped = (log_weight > most).astype(jnp.float32)
    own = {"policy/gate": weight, "policy/clipfrac": capped}
    ratio = jnp.exp(jnp.minimum(log_ratio, surrogates.LARGEST))
    stats |= masked.sum_stats(own, mask=mask)
    return loss, stats | surrogates.ratio_stats(log_ratio, ratio, mask=mask)
