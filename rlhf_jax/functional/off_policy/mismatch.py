"""Distance between sampler and trainer, and the effective size of a weighted batch.

μ drew the tokens, π_old is the trainer before the update, w are importance weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks, kl, masked
from rlhf_jax.functional.off_policy.importance import Correction, Weights

Array = jax.Array
Stats = masked.Stats


def weight_stats(
    output: Weights, *, mask: Bool[Array, "B S"], correction: Correction
) -> Stats:
    """The mean of importance weights, the share that was cut, and the sample size left.

    The effective sample size (Σ w)²/Σ w² counts tokens, or responses where a response
    has one weight. It is a share of their number: 1 where all weights are equal.

    Args:
      mask: bool[B, S], response tokens, those of rejected responses included.

    Returns:
      {name: (sum, weight)}: `policy/sampler_weight`, the mean of w over tokens;
      `policy/sampler_weight_capped`, the share of tokens in `output.cut`;
      `policy/sampler_ess`, the effective sample size. It does not add up over parts, so
      pass the whole batch.

    Source: Kong 1992, "A note on importance sampling using standardized weights".

    >>> weights, mask = jnp.array([[1.0, 3.0]]), jnp.ones((1, 2), bool)
    >>> output = Weights(weights, mask, jnp.array([[False, True]]))
    >>> means = masked.mean_stats(
    ...     weight_stats(output, mask=mask, correction="token_truncate")
    ... )
    >>> print(means["policy/sampler_weight"], means["policy/sampler_ess"])  # 16/10 of 2
    2.0 0.8
    >>> print(means["policy/sampler_weight_capped"])
    0.5
    """
    checks.same_shape(weights=output.weights, mask=mask)
    checks.boolean(mask=mask)
    stats = masked.sum_stats(
        {
            "policy/sampler_weight": output.weights,
            "policy/sampler_weight_capped": output.cut.astype(jnp.float32),
        },
        mask=mask,
    )
    weights, counted = output.weights, mask
    if not correction.startswith("token"):
        counted = mask.any(axis=1)
        # All tokens of a row have the same weight: any reduction picks it.
        weights = jnp.min(weights, axis=1, where=mask, initial=jnp.inf)
    largest = jnp.max(weights, where=counted, initial=0.0)
    scaled = weights / jnp.where(largest > 0, largest, 1.0)  # squares stay finite
    total = jnp.sum(scaled, where=counted)
    squares = jnp.sum(jnp.square(scaled), where=counted)
    size = jnp.square(total) / jnp.where(squares > 0, squares, 1.0)
    count = jnp.sum(counted, dtype=jnp.float32)
    return stats | {"policy/sampler_ess": jax.lax.stop_gradient((size, count))}


def sampler_kl(
    *,
    logprobs: Float32[Array, "B S"],
    sampler_logprobs: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
) -> Stats:
    """KL(μ ‖ π_old) between sampler and trainer, estimated on the sampler's tokens.

    Args:
      logprobs: f32[B, S], nats, log π_old of the trainer.
      sampler_logprobs: f32[B, S], nats, log μ of the policy that drew the tokens.

    Returns:
      {name: (sum, weight)}, nats per token: `policy/sampler_kl` by k1 and
      `policy/sampler_kl_k3` by k3. Both are unbiased; k3 is never negative.

    >>> logprobs = jnp.log(jnp.array([[0.5, 0.2]]))
    >>> sampler_logprobs = jnp.log(jnp.array([[0.5, 0.4]]))
    >>> mask = jnp.ones((1, 2), bool)
    >>> arrays = {"logprobs": logprobs, "sampler_logprobs": sampler_logprobs}
    >>> means = masked.mean_stats(sampler_kl(**arrays, mask=mask))
    >>> print(means["policy/sampler_kl"])  # (log 2)/2
    0.347
    >>> print(means["policy/sampler_kl_k3"])
    0.097
    """
    checks.shape((None, None), mask=mask)
    checks.masked_floats(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    pair = [jnp.where(mask, x, 0.0) for x in (sampler_logprobs, logprobs)]
    return masked.sum_stats(
        {
            "policy/sampler_kl": kl.k1(*pair),
            "policy/sampler_kl_k3": kl.k3(*pair),
        },
        mask=mask,
    )
