"""Linear maps whose transpose is written by hand: forward mode beside a fast backward.

`jax.custom_vjp` has no forward mode. `jax.custom_jvp` has both modes, but its backward
pass is whatever JAX makes by transposing the tangent, step by step. With `linear_call`
as the tangent of a `jax.custom_jvp` a function has `jax.jvp`, `jax.linearize` and a
backward pass of its own.

It differs from `jax.custom_derivatives.linear_call` in three things: `jax.vmap` works,
the residuals may be differentiated (Hessian-vector products), and the transpose learns
which cotangents are zero by structure, so that it can leave their work out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Array = jax.Array


def linear_call(
    forward: Callable[[Any, Any], Any],
    transpose: Callable[[Any, Any], Any],
    residuals: Any,
    tangents: Any,
) -> Any:
    """forward(residuals, tangents), differentiated in reverse mode by `transpose`.

    With F the matrix of `forward` for given residuals, `transpose` computes Fᵀ y.

    >>> double = lambda scale, x: 2.0 * scale * x
    >>> linear_call(double, double, jnp.float32(3.0), jnp.float32(1.0))
    Array(6., dtype=float32)
    >>> call = lambda x: linear_call(double, double, jnp.float32(3.0), x)
    >>> jax.vjp(call, jnp.float32(1.0))[1](jnp.float32(5.0))
    (Array(30., dtype=float32),)

    Args:
      forward: maps residuals and tangents to a pytree of arrays, linear in the
        tangents. It closes over no traced array.
      transpose: maps residuals and cotangents to a pytree like `tangents`. The
        cotangents are like what `forward` returns, with None for each array whose
        cotangent is zero by structure; at least one is an array.
      residuals, tangents: pytrees of arrays. Tangents are floats.

    Returns:
      What `forward` returns.

    Source: Frostig et al. 2021, arXiv:2105.09469 (linearize, then transpose).
    """
    res, res_tree = jax.tree.flatten(residuals)
    lin, lin_tree = jax.tree.flatten(tangents)

    def flat_forward(*arrays: Array) -> list[Array]:
        args = _unflatten(arrays, res_tree, lin_tree)
        return jax.tree.leaves(forward(*args))

    out_tree = jax.tree.structure(jax.eval_shape(forward, residuals, tangents))

    def flat_transpose(
        arrays: Sequence[Array], cotangents: Sequence[Array | None]
    ) -> list[Array]:
        result = transpose(
            jax.tree.unflatten(res_tree, arrays),
            jax.tree.unflatten(out_tree, cotangents),
        )
        return lin_tree.flatten_up_to(result)

    return jax.tree.unflatten(out_tree, _bind(flat_forward, flat_transpose, res, lin))


def call(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), which `jax.linearize` and `jax.grad` keep in one piece.

    Within the rule of a `jax.custom_jvp` they take a loop apart and move what does not
    change out of it, constants of the size of a chunk included, which are then held.

    >>> call(lambda x, y: x - y, jnp.float32(3.0), jnp.float32(1.0))
    Array(2., dtype=float32)
    >>> jax.jvp(lambda x: call(jnp.square, x), (jnp.float32(3.0),), (jnp.float32(1.0),))
    (Array(9., dtype=float32), Array(6., dtype=float32))

    Args:
      function: maps arrays to a pytree of arrays. It closes over no traced array.
      args: pytrees of arrays.

    Returns:
      What `function` returns.
    """

    def forward(args: Any, _: tuple[()]) -> Any:
        return function(*args)

    def transpose(args: Any, _: Any) -> tuple[()]:
        del args
        return ()

    return linear_call(forward, transpose, args, ())


def _unflatten(arrays: Sequence[Array], *trees: Any) -> list[Any]:
    pieces, start = [], 0
    for tree in trees:
        stop = start + tree.num_leaves
        pieces.append(jax.tree.unflatten(tree, arrays[start:stop]))
        start = stop
    return pieces


def _bind(
    forward: Callable[..., list[Array]],
    transpose: Callable[..., list[Array]],
    residuals: Sequence[Array],
    tangents: Sequence[Array],
) -> list[Array]:
    callee = jax.make_jaxpr(forward)(*residuals, *tangents)
    return _linear_call_p.bind(
        *residuals,
        *tangents,
        callee=callee,
        transpose=transpose,
        num_residuals=len(residuals),
    )


def _evaluate(*arrays: Any, callee: ClosedJaxpr, **_: Any) -> list[Any]:
    return jaxpr_as_fun(callee)(*arrays)


def _abstract(*_: Any, callee: ClosedJaxpr, **__: Any) -> Any:
    return callee.out_avals


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    callee: ClosedJaxpr,
    num_residuals: int,
    **params: Any,
) -> tuple[Any, Any]:
    params |= {"callee": callee, "num_residuals": num_residuals}
    if any(type(tangent) is not ad.Zero for tangent in tangents[:num_residuals]):
        filled = [ad.instantiate_zeros(tangent) for tangent in tangents]
        return jax.jvp(jaxpr_as_fun(callee), tuple(primals), tuple(filled))
    filled = [ad.instantiate_zeros(tangent) for tangent in tangents[num_residuals:]]
    return (
        _linear_call_p.bind(*primals, **params),
        _linear_call_p.bind(*primals[:num_residuals], *filled, **params),
    )


def _transpose(
    cotangents: Sequence[Any],
    *arrays: Any,
    transpose: Callable[..., list[Any]],
    num_residuals: int,
    **_: Any,
) -> list[Any]:
    given = [None if type(x) is ad.Zero else x for x in cotangents]
    wanted = [ad.is_undefined_primal(x) for x in arrays]
    if any(wanted[:num_residuals]):
        raise NotImplementedError("a linear_call is not linear in its residuals")
    results: list[Any] = [None] * len(arrays)
    if any(x is not None for x in given):
        results[num_residuals:] = transpose(list(arrays[:num_residuals]), given)
    return [x if want else None for x, want in zip(results, wanted, strict=True)]


def _batch(
    arrays: Sequence[Any],
    axes: Sequence[int | None],
    *,
    callee: ClosedJaxpr,
    transpose: Callable[..., list[Any]],
    num_residuals: int,
) -> tuple[Any, Any]:
    size = next(
        x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None
    )
    res_axes, lin_axes = axes[:num_residuals], axes[num_residuals:]
    residuals = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, res_axes, strict=False)
    ]
    # Every tangent is batched: the transpose of a broadcast is the sum that is due.
    tangents = [
        jnp.broadcast_to(x, (size, *x.shape))
        if axis is None
        else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays[num_residuals:], lin_axes, strict=True)
    ]
    leading = [None if axis is None else 0 for axis in res_axes]
    forward = jax.vmap(jaxpr_as_fun(callee), in_axes=(*leading, *[0] * len(tangents)))
    out = _bind(
        forward,
        jax.vmap(transpose, in_axes=(leading, 0)),
        residuals,
        tangents,
    )
    return out, [0] * len(out)


_linear_call_p = Primitive("linear_call_with_residuals")
_linear_call_p.multiple_results = True
_linear_call_p.def_impl(_evaluate)
_linear_call_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear_call_p] = _jvp
ad.primitive_transposes[_linear_call_p] = _transpose
batching.primitive_batchers[_linear_call_p] = _batch
mlir.register_lowering(_linear_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
