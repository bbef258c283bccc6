"""KTO: a loss over single responses, each labelled desirable or undesirable.

The losses of micro-batches add up if they share the number of texts (`num_texts`) and
the z0 (`kto_kl`) of the whole minibatch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, Shaped

from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.preference_losses.bradley_terry import per_pair

Array = jax.Array
Stats = masked.Stats


def kto_kl(
    *,
    logprobs: Float32[Array, " B"],
    ref_logprobs: Float32[Array, " B"],
    mask: Bool[Array, " B"] | None = None,
) -> Float32[Array, ""]:
    """z0 = max(0, (1/N) Σ log π(y'|x)/π_ref(y'|x)), KTO's reference point.

    y' is a response to another prompt of the data. The paper's z0 is KL(π ‖ π_ref), an
    expectation over responses of π. This estimate from mismatched responses is biased,
    as y' does not come from π, and often 0.

    Args:
      logprobs, ref_logprobs: f32[B], nats, sums over the tokens of y', of the policy
        and the reference, over the whole minibatch.

    Returns:
      f32[], nats per response; 0 without texts. No gradient reaches any argument.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, its L_KTO and z_0.

    >>> ref_logprobs = jnp.array([-3.0, -3.0])
    >>> print(kto_kl(logprobs=jnp.array([-1.0, -2.0]), ref_logprobs=ref_logprobs))
    1.5
    >>> print(kto_kl(logprobs=jnp.array([-9.0, -2.0]), ref_logprobs=ref_logprobs))
    0.0
    """
    checks.shape((None,), logprobs=logprobs)
    if mask is None:
        mask = jnp.ones(logprobs.shape, jnp.bool_)
    checks.masked_floats(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    mean = masked.masked_mean(jnp.where(mask, logprobs - ref_logprobs, 0.0), mask=mask)
    # A KL is not negative; its estimate from mismatched responses may be.
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


def kto_loss(
    *,
    logprobs: Float32[Array, " B"],
    ref_logprobs: Float32[Array, " B"],
    desirable: Bool[Array, " B"],
    kl: Float32[Array, ""],
    beta: checks.Scalar,
    desirable_weight: checks.Scalar = 1.0,
    undesirable_weight: checks.Scalar = 1.0,
    num_texts: Shaped[Array, ""] | None = None,
    mask: Bool[Array, " B"] | None = None,
) -> tuple[Float32[Array, ""], Stats]:
    """KTO, (1/N) Σ λ_y - v(x, y), with u = log π(y)/π_ref(y) and z0 = kl.

        desirable     λ_D σ(β(z0 - u))        = λ_D - λ_D σ(β(u - z0))
        undesirable   λ_U σ(β(u - z0))        = λ_U - λ_U σ(β(z0 - u))

    The loss of a text is bounded: far on the wrong side its gradient vanishes. Where
    the labels of one response differ, the loss falls as u moves ever further to the
    side of the (weighted) majority: its minimum is not π* ∝ π_ref exp(r/β).

    Args:
      logprobs: f32[B], nats, sums over the response tokens.
      ref_logprobs: f32[B], nats, the reference's.
      desirable: bool[B], the label.
      kl: f32[], nats per response, `kto_kl` of the whole minibatch.
      desirable_weight, undesirable_weight: λ_D and λ_U, dimensionless.

    Returns:
      f32[] loss and {name: (sum, weight)}. The gradient reaches `logprobs`, β and both
      weights; z0 has none. `loss/dpo`: the loss. `kto/kl`: z0, nats per response.
      Means over the texts of a label: `kto/desirable_reward`,
      `kto/undesirable_reward`, βu, reward units; `kto/desirable_logprob`,
      `kto/undesirable_logprob`, nats per response.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, its L_KTO and z_0.

    >>> texts = {"logprobs": jnp.array([-1.0, -2.0])}
    >>> texts |= {"ref_logprobs": jnp.array([-2.0, -2.0])}
    >>> texts |= {"desirable": jnp.array([True, False])}
    >>> loss, stats = kto_loss(**texts, kl=jnp.float32(0), beta=1.0)
    >>> print(loss)  # (1 / (1 + e) + 1 / 2) / 2
    0.384
    >>> print(masked.mean_stats(stats)["kto/desirable_reward"])
    1.0
    """
    checks.positive(
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    checks.shape((None,), logprobs=logprobs)
    checks.shape((), kl=kl)
    if mask is None:
        mask = jnp.ones(logprobs.shape, jnp.bool_)
    checks.masked_floats(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    checks.same_shape(desirable=desirable, mask=mask)
    checks.float32(kl=kl)
    checks.boolean(desirable=desirable)
    logprobs = jnp.where(mask, logprobs, 0.0)
    ref_logprobs = jax.lax.stop_gradient(jnp.where(mask, ref_logprobs, 0.0))
    kl = jax.lax.stop_gradient(kl)
    ratio = logprobs - ref_logprobs
    wrong = jnp.where(desirable, kl - ratio, ratio - kl)
    weight = jnp.where(
        desirable, jnp.float32(desirable_weight), jnp.float32(undesirable_weight)
    )
    losses = weight * jax.nn.sigmoid(beta * wrong)
    stats = masked.sum_stats(
        {"loss/dpo": losses, "kto/kl": jnp.broadcast_to(kl, losses.shape)}, mask=mask
    )
    for name, of in {"desirable": desirable, "undesirable": ~desirable}.items():
        stats |= masked.sum_stats(
            {f"kto/{name}_reward": beta * ratio, f"kto/{name}_logprob": logprobs},
            mask=mask & of,
        )
    return per_pair(losses, mask=mask, num_pairs=num_texts), stats
