"""Layouts: choices by backend that change how fast something runs, and only rounding.

`fastest` makes those of a model, as measured. A `ModelConfig` that is built by hand has
the layout that every backend runs well and that compiles in the time of one layer.
`change_if` is how an optimizer's step is made or left out, `product` how a matrix meets
its weights, `transposed_product` how a few rows do.

Seconds of a PPO update by XLA:CPU, 2 cores with AVX-512, jax 0.10, with a loop over the
layers and with layers one by one:

    2 layers, d 64      0.197  0.125    a loop's own work is most of it
    4 layers, d 256    5.95   4.93     what a loop keeps for the gradient is copied
    12 layers, d 768   6.3    6.3      and takes 2.5 times as long to compile
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from rlhf_jax.models import engine_choice
from rlhf_jax.models.config import ModelConfig

Tree = TypeVar("Tree")

UNROLLED = {"cpu": 8}  # most layers that run one by one, by backend; else none
TRANSPOSED_ROWS = (
    32  # most tokens at a time for which a CPU takes `transposed_product`...
)
TRANSPOSED_SIZE = 512  # ...in models that are at least so wide


def fastest(model: ModelConfig, *, backend: str | None = None) -> ModelConfig:
    """The same model as it runs fastest on a backend.

    Args:
      backend: "cpu", "gpu" or "tpu"; None is the default one of this process.

    Raises:
      InputError: the backend does not have the attention that the model asks for.
    """
    backend = jax.default_backend() if backend is None else backend
    engine_choice.refuse(model, backend=backend)
    unroll = model.num_layers <= UNROLLED.get(backend, 0)
    wide = backend == "cpu" and model.hidden_size >= TRANSPOSED_SIZE
    transposed_rows = TRANSPOSED_ROWS if wide else 0
    return dataclasses.replace(model, unroll=unroll, transposed_rows=transposed_rows)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w, a matrix product whose gradient of w is taken as the backend does it best.

    A CPU transposes x in memory first: XLA:CPU is slow where both operands contract
    their first dimension, the slower the more columns x has. Of [1024, k] and
    [1024, n], 2 cores of an EPYC, jax 0.10, in ms: k 256, n 256 0.97 and 0.80; k 1024,
    n 256 4.5 and 3.0; k 256, n 1024 3.0 and 2.8. Where `remat` keeps products in a loop
    over layers, up to an eighth more memory is held. Elsewhere, and within `shard_map`,
    it is x @ w.

    Args:
      x: floats[..., N, k].
      w: [..., k, n], of the same dtype.

    Returns:
      [..., N, n].
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual or jax.default_backend() != "cpu" or x.shape[:-2] != w.shape[:-2]:
        return x @ w
    return _product(x, w)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _product_backward(
    factors: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def laid_out(x: jax.Array, gradient: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x.mT) @ gradient

    x, w = factors
    of_w = jax.lax.platform_dependent(
        x, gradient, cpu=laid_out, default=lambda x, gradient: x.mT @ gradient
    )
    return gradient @ w.mT, of_w


_product.defvjp(lambda x, w: (x @ w, (x, w)), _product_backward)


def transposed_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x wᵀ, computed as (w xᵀ)ᵀ, for few rows of x.

    XLA:CPU reads weights faster where they come first. Of 8 rows, 2 cores of an EPYC,
    jax 0.10, in ms, as x @ W of [in, out], as x @ wᵀ, and so: in 3072, out 768 0.58,
    1.01 and 0.37; in 768, out 3072 0.56, 0.78 and 0.46; a head of 50,304 tokens 9.8,
    11.6 and 6.6. At 64 rows an eighth to a fifth is left, in narrow models little.

    Args:
      x: floats[N, in].
      w: [out, in], of the same dtype.

    Returns:
      f32[N, out].
    """
    y = jnp.matmul(w, x.T, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T  # else XLA undoes both transpositions


def change_if(flag: jax.Array, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """change(tree) where the flag is True; elsewhere the tree itself, to the bit.

    On a CPU by a branch, which writes over what is donated, where a choice element by
    element has XLA:CPU copy every moment of an optimizer first. Elsewhere by such a
    choice, as a GPU would have to ask its host which branch to launch; also outside of
    `jit`, where a branch is compiled at every call, and within `shard_map`, where
    devices may differ. `vmap` makes a choice of the branch.

    Args:
      change: keeps structure, shapes and dtypes.
    """

    def branch(flag: jax.Array, tree: Tree) -> Tree:
        return jax.lax.cond(flag, change, lambda tree: tree, tree)

    def choice(flag: jax.Array, tree: Tree) -> Tree:
        return jax.tree.map(
            lambda new, old: jnp.where(flag, new, old), change(tree), tree
        )

    apart = jax.sharding.get_abstract_mesh().manual_axes
    if apart or not isinstance(flag, Tracer):
        return choice(flag, tree)
    return jax.lax.platform_dependent(flag, tree, cpu=branch, default=choice)
