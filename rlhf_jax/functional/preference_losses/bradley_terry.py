"""Bradley-Terry, the loss of a reward model; and the mean of any loss over pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Shaped

from rlhf_jax.functional import checks, masked

Array = jax.Array
Stats = masked.Stats


def pairwise_loss(
    *,
    chosen: Float32[Array, " B"],
    rejected: Float32[Array, " B"],
    margin: Float32[Array, " B"] | None = None,
    num_pairs: Shaped[Array, ""] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """Bradley-Terry, -(1/N) Σ log σ(chosen - rejected - margin).

    Args:
      chosen, rejected: f32[B], reward units, scores of the two responses of a pair.
      margin: f32[B], reward units by which chosen should lead; None is 0.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `chosen` and
      `rejected`. `loss/pairwise`: the loss. `pairwise/accuracy`: share of pairs with
      chosen > rejected, whatever the margin; a tie counts as wrong. `pairwise/lead`:
      chosen - rejected, reward units.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4; the margin is
    Touvron et al. 2023, arXiv:2307.09288, eq. 2.

    >>> chosen, rejected = jnp.array([1.0, 0.0]), jnp.array([0.0, 0.0])
    >>> loss, stats = pairwise_loss(chosen=chosen, rejected=rejected)
    >>> print(loss)  # (log(1 + 1/e) + log 2) / 2
    0.503
    >>> print(masked.mean_stats(stats)["pairwise/accuracy"])
    0.5
    """
    checks.shape((None,), chosen=chosen)
    margin = jnp.zeros_like(chosen) if margin is None else margin
    checks.same_shape(chosen=chosen, rejected=rejected, margin=margin)
    checks.float32(chosen=chosen, rejected=rejected, margin=margin)
    every_pair = jnp.ones(chosen.shape, jnp.bool_)
    lead = chosen - rejected
    losses = -jax.nn.log_sigmoid(lead - jax.lax.stop_gradient(margin))
    stats = masked.sum_stats(
        {
            "loss/pairwise": losses,
            "pairwise/accuracy": (lead > 0).astype(jnp.float32),
            "pairwise/lead": lead,
        },
        mask=every_pair,
    )
    return per_pair(losses, mask=every_pair, num_pairs=num_pairs), stats


def per_pair(
    losses: Float32[Array, " B"],
    *,
    mask: Bool[Array, " B"],
    num_pairs: Shaped[Array, ""] | None = None,
) -> Float32[Array, ""]:
    """Σ m·loss / N: the mean over pairs or texts, or a micro-batch's part of it.

    >>> losses, mask = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])
    >>> print(per_pair(losses, mask=mask))
    2.0
    >>> print(per_pair(losses, mask=mask, num_pairs=jnp.float32(4)))
    1.0
    """
    if num_pairs is None:
        return masked.masked_mean(losses, mask=mask)
    checks.shape((), num_pairs=num_pairs)
    count = jax.lax.stop_gradient(jnp.asarray(num_pairs, jnp.float32))
    return masked.masked_sum(losses, mask=mask) / jnp.maximum(count, 1.0)
