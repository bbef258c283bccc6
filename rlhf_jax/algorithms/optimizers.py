"""Optimizers: Adam with the options of RLHF codebases, and Muon for stacked layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from rlhf_jax.functional import checks

Array = jax.Array
Params = Any

Style = Literal["standard", "tf"]
"""Place of eps: sqrt(v̂) + eps as in the paper, or sqrt(v) + eps as in TF 1."""

MomentDtype = Literal["float32", "bfloat16"]
"""Dtype in which m is stored between updates."""


def adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-5,
    style: Style = "standard",
    mu_dtype: MomentDtype = "float32",
    weight_decay: float | None = None,
    decayed: Callable[[Params], Params] | None = None,
) -> optax.GradientTransformation:
    """Adam, with m and v the running means of the gradient and of its square.

        standard  -lr · m̂ / (sqrt(v̂) + eps)    m̂ = m/(1 - b1^t), v̂ = v/(1 - b2^t)
        tf        -lr · sqrt(1 - b2^t)/(1 - b1^t) · m / (sqrt(v) + eps)

    The second is the first with eps/sqrt(1 - b2^t) in place of eps: 32 times as much in
    the first step with b2 = 0.999, 1.2 times in step 1200. Early in the run, gradients
    that are small against it then hardly move their parameters.

    In bfloat16 m takes 2 bytes per parameter instead of 4. It is rounded once per
    update, after the step, with a relative error of u = 2^-8: with b1 = 0.9 it is at
    most u/(1 - b1) = 4% off, less than the noise of a gradient. v is always float32.
    With b2 = 0.999 an update moves v by 0.1% of g² - v, and bfloat16 would round
    changes below u = 0.4% of v to nothing: v would stand still.

    Args:
      learning_rate: lr, or a schedule, update (from 0) -> lr, as in optax.
      weight_decay: λ of AdamW, adds -lr · λ · parameter to Adam's step; None is Adam.
      decayed: parameters -> tree of bool, True where they decay; None is all.

    Returns:
      To be chained after clipping by norm. The states of both styles have the same
      structure.

    Source: Kingma & Ba 2015, arXiv:1412.6980, algorithm 1, and the end of section 2 for
    tf; for its effect on RLHF, Huang et al. 2023, "The N Implementation Details of RLHF
    with PPO".
    """
    if not callable(learning_rate):
        checks.non_negative(learning_rate=learning_rate)
    checks.positive(eps=eps)
    checks.within(least=0, below=1, advice="choose another decay", b1=b1, b2=b2)
    checks.one_of(style=style, among=get_args(Style))
    checks.one_of(mu_dtype=mu_dtype, among=get_args(MomentDtype))
    scale_by = optax.scale_by_adam if style == "standard" else _scale_by_tf_adam
    scale = scale_by(b1=b1, b2=b2, eps=eps)
    if mu_dtype == "bfloat16":
        scale = _holding_m_in_bfloat16(scale)
    checks.non_negative(weight_decay=weight_decay)
    decay = []
    if weight_decay is not None:
        decay = [optax.add_decayed_weights(weight_decay, decayed)]
    return optax.chain(scale, *decay, optax.scale_by_learning_rate(learning_rate))


def are_matrices(params: Params) -> Params:
    """A tree of bool, True at leaves that are a matrix, or one matrix per layer.

    Norms and biases are False, although those of stacked layers have two axes.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim - _stacked(path) >= 2, params
    )


def keep_buffers() -> optax.GradientTransformation:
    """Sets updates of `layer_scale` to 0. To be chained last.

    It is a buffer of a checkpoint without a gradient: weight decay alone would move it.
    """

    def of(path: Any, leaf: Array) -> Array:
        fixed = getattr(path[-1], "key", None) == "layer_scale"
        return jnp.zeros_like(leaf) if fixed else leaf

    def kept(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return jax.tree_util.tree_map_with_path(of, updates)

    return optax.stateless(kept)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta: float = 0.95,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Muon for the matrices of layers, AdamW for embeddings, heads, norms and biases.

        m ← β·m + g        update = -lr · (sqrt(max(1, rows/columns))·O(β·m + g) + λ·θ)

    with O the orthogonal factor of a matrix, by `ns_steps` Newton-Schulz steps. It is
    `optax.contrib.muon`, told that the first axis of stacked layers f32[L, in, out]
    counts layers: each layer's matrix is orthogonalised by itself.

    Args:
      learning_rate: lr of both rules, or a schedule, update (from 0) -> lr.
      beta: decay of Muon's momentum, dimensionless.
      ns_steps: Newton-Schulz iterations, 1 or more.
      weight_decay: λ of both rules.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    checks.within(least=0, below=1, advice="choose another decay", beta=beta)
    checks.at_least_one(ns_steps=ns_steps)
    checks.non_negative(weight_decay=weight_decay)

    def dimensions(params: Params) -> Params:
        def of(path: Any, leaf: Array) -> Any:
            # Taps of a convolution, one filter per channel, are not a matrix.
            taps = getattr(path[-1], "key", "").endswith("_taps")
            if not _stacked(path) or leaf.ndim < 3 or taps:
                return None
            last = leaf.ndim - 1
            return optax.contrib.MuonDimensionNumbers(last - 1, last)

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(
        learning_rate,
        beta=beta,
        ns_steps=ns_steps,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=dimensions,
    )


def _stacked(path: Any) -> bool:
    """Whether the first axis of a leaf counts layers."""
    return any(getattr(key, "key", None) == "layers" for key in path)


def _holding_m_in_bfloat16(
    scale: optax.GradientTransformation,
) -> optax.GradientTransformation:
    # Not optax's mu_dtype, which multiplies b1 and m in bfloat16, where 0.9 is 0.898:
    # that alone makes m 1.5% too small for a constant gradient.
    def stored(state: optax.OptState, dtype: jnp.dtype) -> optax.ScaleByAdamState:
        assert isinstance(state, optax.ScaleByAdamState)
        return state._replace(mu=optax.tree.cast(state.mu, dtype))

    def init(params: optax.Params) -> optax.OptState:
        return stored(scale.init(params), jnp.bfloat16)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        step, state = scale.update(updates, stored(state, jnp.float32), params)
        return step, stored(state, jnp.bfloat16)

    return optax.GradientTransformation(init, update)


def _scale_by_tf_adam(
    *, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    moments = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        # optax updates the moments; its step is not used.
        _, state = moments.update(updates, state, params)
        assert isinstance(state, optax.ScaleByAdamState)
        count = jnp.asarray(state.count, jnp.float32)
        correction = jnp.sqrt(_one_less_power(b2, count)) / _one_less_power(b1, count)
        step = jax.tree.map(
            lambda m, v: correction * m / (jnp.sqrt(v) + eps), state.mu, state.nu
        )
        return step, state

    return optax.GradientTransformation(moments.init, update)


def _one_less_power(decay: float, count: Array) -> Array:
    """1 - decay^count, without the cancellation of a decay near 1; f32[]."""
    if decay == 0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(count * math.log(decay))
