"""KL between two heads over one vocabulary, in chunks of tokens, with a custom VJP.

Nothing here shifts columns: position t is about the distribution that hidden[:, t]
gives. `kl.exact_from_hidden` and `kl.jensen_shannon_from_hidden` are the public names.

With z, y the logits / temperature of policy and reference, P, Q their softmax and
d_v = z_v - y_v of a token (or of the bucket of all tokens outside a top k, from its
log-sum-exps), the KL and its gradient with respect to z_v are

    level    log Σ exp(z) - log Σ exp(y)
    reverse  KL = E_P[d] - level    P_v (d_v - E_P[d])
    forward  KL = level - E_Q[d]    P_v - exp(z_v - d_v) / Σ exp(y)

One pass over the tokens accumulates E[d] and both sums. Between equal models every d is
exactly 0, and so is the KL. The backward pass rematerialises the logits of each chunk.
The Jensen-Shannon divergence (`mixtures`) reads level - d = log(Q/P), so it needs a
second pass after the sums.

The reference has no gradient, but the temperature τ divides its logits too:

    ∂KL/∂τ = -(1/τ) Σ_v (log P_v ∂KL/∂z_v + log Q_v ∂KL/∂y_v)
    ∂KL/∂y_v   reverse  Q_v - exp(y_v + d_v) / Σ exp(z)    forward  Q_v (E_Q[d] - d_v)

Both slopes sum to 0 over v, so log P and log Q may replace z and y. This sum is
computed only where τ is differentiated. The passes themselves are in `passes`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rlhf_jax.functional import checks
from rlhf_jax.functional.kl import mixtures, passes
from rlhf_jax.functional.kl.passes import Model, Plan, Result

Array = jax.Array


class _Saved(NamedTuple):
    """Residuals of the forward pass."""

    policy: Model
    reference: Model
    beta: Array | None
    result: Result
    # An empty tuple where temperature or β is differentiated, None where not: part of
    # the tree structure, and so static.
    scalars: tuple[()] | None


def divergence(
    hidden: Array,
    head: Array,
    ref_hidden: Array,
    ref_head: Array,
    *,
    temperature: checks.Scalar,
    plan: Plan,
    beta: checks.Scalar | None = None,
) -> Array:
    """KL of softmax(hidden·headᵀ / T) and softmax(ref_hidden·ref_headᵀ / T).

    Args:
      hidden: floats[B, T, D]. head: floats[V', D].
      ref_hidden: floats[B, T, D']. ref_head: floats[V'', D'].
      temperature: T, dimensionless.
      beta: share of the reference in the mixture of a Jensen-Shannon divergence; None
        is a KL.

    Returns:
      f32[B, T], nats. The gradient reaches `hidden`, `head`, `temperature` and `beta`;
      a position whose cotangent is 0 contributes nothing, whatever its hidden state.
    """
    scale = jnp.asarray(temperature, jnp.float32)
    # A number is static, and 0 < β < 1 is checked at trace time; an array is traced.
    plan = plan._replace(beta=checks.number(beta))
    traced = plan.beta is None and beta is not None
    return _divergence(
        plan,
        Model(hidden, head, scale),
        Model(ref_hidden, ref_head, scale),
        jnp.asarray(beta, jnp.float32) if traced else None,
    )


def head_and_inside(
    hidden: Array,
    head: Array,
    ref_hidden: Array,
    ref_head: Array,
    *,
    tokens: Array,
    temperature: checks.Scalar,
    plan: Plan,
) -> tuple[Array, Array]:
    """Σ_{v in K} P_v log(P_v/Q_v), K the k likeliest tokens, and whose token is in K.

    Args:
      tokens: i32[B, T], the token drawn at each position.
      plan: with `head` and k.
      the others: as in `divergence`.

    Returns:
      f32[B, T], nats, whose gradient Σ_{v in K} ∇P_v·log(P_v/Q_v) reaches `hidden` and
      `head`, and bool[B, T], True where the token of a position is in K.
    """
    scale = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    policy, reference = Model(hidden, head, scale), Model(ref_hidden, ref_head, scale)
    output: Any = _divergence(plan, policy, reference, None)
    return output[0], jnp.any(output[1] == tokens[..., None], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(plan: Plan, policy: Model, reference: Model, beta: Array | None) -> Any:
    return _output(passes.forward(policy, reference, beta, plan), plan)


def _output(result: Result, plan: Plan) -> Any:
    """The divergence; with `plan.head` also the tokens of K, which have no gradient."""
    if not plan.head:
        return result.kl
    assert result.rest is not None
    return result.kl, result.rest.alone


def _forward(plan: Plan, *primals: Any) -> tuple[Any, _Saved]:
    policy, reference, beta = jax.tree.map(lambda primal: primal.value, primals)
    scalars = (primals[0].temperature, primals[2])
    wanted = any(primal is not None and primal.perturbed for primal in scalars)
    result = passes.forward(policy, reference, beta, plan)
    saved = _Saved(policy, reference, beta, result, () if wanted else None)
    return _output(result, plan), saved


def _backward(
    plan: Plan, saved: _Saved, cotangent: Any
) -> tuple[Model, None, Array | None]:
    if plan.head:
        cotangent, _ = cotangent
    policy, _, beta, result, scalars = saved
    hidden, head, temperature = policy
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros_like(result.kl)
    live = cotangent != 0
    scale = (cotangent / temperature)[..., None]
    # A masked position may hold NaN, and 0 · NaN would reach the head's gradient.
    live_hidden = jnp.where(live[..., None], hidden, jnp.zeros_like(hidden))

    def step(carry: tuple[Array, Array, Any], index: Array) -> tuple[Any, ...]:
        for_hidden, for_head, inner = carry
        start, fresh = passes.tokens(index, plan)
        z, for_logits, log_products = _slopes(saved, start, plan)
        if inner is not None:
            inner += jnp.sum(log_products, axis=-1, where=fresh)
        slope = scale
        if plan.softcap is not None:
            slope = scale * (1 - jnp.square(z * (temperature / plan.softcap)))
        for_logits = jnp.where(live[..., None] & fresh, for_logits * slope, 0.0)
        for_logits = for_logits.astype(hidden.dtype)
        rows = jax.lax.dynamic_slice_in_dim(head, start, plan.chunk)
        if plan.unused:  # their rows may hold NaN, and 0 · NaN is NaN
            rows = jnp.where(fresh[0, 0, :, None], rows, jnp.zeros_like(rows))
        for_hidden += jnp.einsum(
            "btv,vd->btd",
            for_logits,
            rows.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        for_rows = jnp.einsum(
            "btv,btd->vd", for_logits, live_hidden, preferred_element_type=jnp.float32
        ).astype(head.dtype)
        # Where chunks overlap, a token is fresh in one and adds 0 in the other.
        for_rows += jax.lax.dynamic_slice_in_dim(for_head, start, plan.chunk)
        for_head = jax.lax.dynamic_update_slice_in_dim(
            for_head, for_rows, start, axis=0
        )
        return for_hidden, for_head, inner

    # Most losses fix the temperature: its sum is then not computed.
    inner = None if scalars is None else jnp.zeros_like(result.kl)
    empty = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head), inner
    for_hidden, for_head, inner = passes.loop(step, empty, plan)
    for_temperature = jnp.zeros_like(temperature)
    for_beta = None if beta is None else jnp.zeros_like(beta)
    if inner is not None:
        for_temperature = -jnp.sum(scale[..., 0] * inner, where=live)
        if beta is not None:
            apart = _ref_mean(result, beta) - result.mean
            for_beta = jnp.sum(cotangent * apart, where=live)
    for_policy = Model(for_hidden.astype(hidden.dtype), for_head, for_temperature)
    # None: by definition the reference's hidden states and head have no gradient.
    return for_policy, None, for_beta


_divergence.defvjp(_forward, _backward, symbolic_zeros=True)


def _ref_mean(result: Result, beta: checks.Scalar) -> Array:
    """KL(π_ref ‖ M) = (JSD_β - (1 - β)·KL(π ‖ M))/β, f32[B, T]."""
    return (result.kl - (1 - beta) * result.mean) / beta


def _slopes(saved: _Saved, start: Array, plan: Plan) -> tuple[Array, Array, Array]:
    """z of a chunk, ∂KL/∂z, and the terms of the sum ∂KL/∂(-log τ).

    f32[B, T, chunk] each. The compiler drops the last where nothing reads it.
    """
    result = saved.result
    z, y = passes.both(saved.policy, saved.reference, start, plan)
    difference = z - y
    if result.rest is not None:
        alone = passes.marked(result.rest.alone - start, size=plan.chunk)
        rest = result.rest.difference[..., None]
        difference = jnp.where(alone, difference, rest)
    mean = result.mean[..., None]
    log_policy = z - result.log_sum[..., None]
    log_reference = y - result.ref_log_sum[..., None]
    slope, ref_slope = jnp.exp(log_policy), jnp.exp(log_reference)
    beta = plan.beta if saved.beta is None else saved.beta
    if beta is not None:
        log_ratio = (result.log_sum - result.ref_log_sum)[..., None] - difference
        own, other = mixtures.mixture_log_ratios(log_ratio, beta=beta)
        slope *= (1 - beta) * (own - mean)
        ref_slope *= beta * (other - _ref_mean(result, beta)[..., None])
    elif plan.forward:
        slope -= jnp.exp(z - difference - result.ref_log_sum[..., None])
        ref_slope *= mean - difference
    else:
        slope *= difference - mean
        ref_slope -= jnp.exp(y + difference - result.log_sum[..., None])
    return z, slope, log_policy * slope + log_reference * ref_slope
