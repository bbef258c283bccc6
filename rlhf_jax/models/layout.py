"""Layouts: choices by backend that change speed, and results only by rounding.

`fastest` sets the layout of a model, as measured. A `ModelConfig` that is built by hand
has the layout that every backend runs well and that compiles in the time of one layer.

`choose` picks the engine of `attention/` for whole rows. `auto` is xla for short rows.
For long rows it is the flash attention of the backend if that can compute the model's
attention (splash on a TPU, cuDNN on an NVIDIA GPU), else blockwise, which runs
everywhere; and ring where devices share rows too long for any of them to gather.

`change_if` applies an optimizer's step or skips it, `product` multiplies by weights,
`transposed_product` does so for few rows, and `apart` keeps a product unmerged.

Seconds of a PPO update by XLA:CPU, 2 cores with AVX-512, jax 0.10, with a loop over the
layers and with layers one by one:

    2 layers, d 64      0.197  0.125    the loop's overhead is most of the time
    4 layers, d 256    5.95   4.93     a loop copies what it keeps for the gradient
    12 layers, d 768   6.3    6.3      one by one compiles 2.5 times as long
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes
from rlhf_jax.models.axes import CONTEXT_AXIS
from rlhf_jax.models.config import Attention, ModelConfig

# Engines that need a backend.
BACKEND: dict[Attention, str] = {"splash": "tpu", "cudnn": "gpu"}
# Columns from which xla's [B, H, S, S] costs more than a loop over blocks, measured on
# CPUs (`experiments/benchmarks/attention.py`).
LONG = 1024
# Engines that take queries of any columns, as devices that share a row have.
ANY_COLUMNS: tuple[Attention, ...] = ("xla", "blockwise", "splash", "ring")
# Most bytes of a row's keys and values in a layer that a device gathers where devices
# share its columns: with copies and gradients that takes three times as much (H100).
GATHERED = 2**30
# Engines for texts that share a prefix, such as the responses to one prompt.
PREFIXES: tuple[Attention, ...] = ("xla", "blockwise", "cudnn")
CUDNN_HEAD_DIM = 128  # largest that the backward pass takes on every GPU
SPLASH_HEAD_DIM = 64  # head_dim must be a multiple of this


class Choice(NamedTuple):
    """An engine, and why it was chosen, in words that follow its name."""

    engine: Attention
    reason: str


def choose(
    model: ModelConfig,
    *,
    columns: int,
    backend: str | None = None,
    context: int | None = None,
    tensor: int | None = None,
) -> Choice:
    """Chooses the attention engine for rows of a model.

    Args:
      backend: "cpu", "gpu" or "tpu"; None: that of the mesh that is set, or else the
        default of this process.
      context: devices that share the columns of a row; None: as on the mesh that is
        set.
      tensor: devices that share the heads; None as `context`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if backend is None:
        backend = backend_of(mesh)
    sharing: int = dict(mesh.shape).get(CONTEXT_AXIS, 1) if context is None else context
    # Rows whose columns are not shared, such as prompts in sampling, have no ring.
    if model.attention != "auto" and (model.attention != "ring" or sharing > 1):
        return Choice(model.attention, "as asked")
    if columns < LONG:
        return Choice("xla", "as they are short")
    heads: int = dict(mesh.shape).get(axes.TENSOR_AXIS, 1) if tensor is None else tensor
    numbers = 2 * columns * _gathered_numbers(model, tensor=heads)
    gathered = numbers * jnp.dtype(model.dtype).itemsize
    if sharing > 1 and gathered > GATHERED:
        reason = (
            f"as keys and values of a row take {gathered / 2**30:.1f} GiB per layer"
        )
        return Choice("ring", reason)
    own: dict[str, Attention] = {at: name for name, at in BACKEND.items()}
    flash = own.get(backend)
    if flash is None:
        return Choice("blockwise", f"as {backend} has no flash attention of its own")
    obstacle = obstacle_to(flash, model)
    if flash not in ANY_COLUMNS and sharing > 1:
        obstacle = "has no context axis"
    if obstacle is not None:
        return Choice("blockwise", f"as {flash} {obstacle}")
    return Choice(flash, f"the flash attention of {backend}")


def _gathered_numbers(model: ModelConfig, *, tensor: int) -> int:
    """Numbers of a column's keys that a device gathers, of the largest kind of layer.

    `tensor` shares the heads where it can, as `attention/per_device.py` does.
    """

    def of_layer(own: ModelConfig) -> int:
        heads = own.num_kv_heads
        if axes.shares_heads(own.num_heads, heads, devices=tensor):
            heads = max(1, heads // tensor)
        return heads * own.head_dim

    layers = map(model.at, model.attention_layers)
    return max(map(of_layer, layers), default=0)


def obstacle_to(engine: Attention, model: ModelConfig) -> str | None:
    """Why an engine cannot compute a model's attention on any machine, or None."""
    if engine == "cudnn":
        if model.attention_softcap is not None:
            return "has no soft cap"
        if model.sinks:
            return "has no attention sinks"
        if model.dtype != "bfloat16":
            return f"computes in bfloat16, and the model in {model.dtype}"
        for head_dim in model.head_dims:
            if head_dim % 8 or head_dim > CUDNN_HEAD_DIM:
                return f"has no kernel for heads of {head_dim} numbers"
    if engine == "splash":
        for head_dim in model.head_dims:
            if head_dim % SPLASH_HEAD_DIM:
                return f"has no kernel for heads of {head_dim} numbers"
    return None


def refuse(model: ModelConfig, *, backend: str) -> None:
    """Raises if a backend lacks the engine that a model names.

    Raises:
      InputError: says which backend the engine needs, or what it cannot compute.
    """
    needs = BACKEND.get(model.attention, backend)
    if needs != backend:
        raise InputError(
            f"expected a {needs.upper()} for attention {model.attention}, got the "
            f"backend {backend}; choose auto"
        )
    obstacle = obstacle_to(model.attention, model)
    if obstacle is not None:
        raise InputError(
            f"expected a model that attention {model.attention} can compute, got one "
            f"that it cannot: {model.attention} {obstacle}; choose auto"
        )


def refuse_context(
    engine: Attention, *, context: int, model: ModelConfig | None = None
) -> None:
    """Raises if an engine or a model cannot run with `context` devices per row.

    Raises:
      InputError: `context` > 1 with an engine that needs whole rows or with recurrent
        layers; or ring with `context` = 1.
    """
    if context > 1 and model is not None and model.recurrent_layers:
        raise InputError(
            f"expected a mesh without a context axis for a {model.family}, whose "
            f"recurrent layers pass a state from column to column; share rows by data "
            f"and fsdp"
        )
    if context > 1 and engine not in (*ANY_COLUMNS, "auto"):
        raise InputError(
            f"expected attention {', '.join(ANY_COLUMNS[:-1])} or {ANY_COLUMNS[-1]} on "
            f"a mesh with a context axis, got {engine}; choose auto, or leave context "
            f"out of the mesh"
        )
    if context == 1 and engine == "ring":
        raise InputError(
            "expected a mesh with a context axis, whose devices pass keys round, for "
            "attention ring, got context=1; add one to --placement.policy, as "
            "context=4, or choose auto"
        )


def refuse_expert_axis(devices: int, *, model: ModelConfig) -> None:
    """Raises if devices would share the experts of a model that has none.

    Raises:
      InputError: the mesh has an expert axis, and the model is dense.
    """
    if devices > 1 and model.experts is None:
        raise InputError(
            f"--placement.policy: expected a mixture of experts with expert={devices}, "
            f"got a dense {model.family}; share its rows by data or fsdp"
        )


def backend_of(mesh: AbstractMesh) -> str:
    """The backend of a mesh, or of this process: "cpu", "gpu" or "tpu"."""
    device = mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform == "cuda" else platform


Tree = TypeVar("Tree")

UNROLLED = {"cpu": 8}  # most layers that run one by one, by backend; else none
# A CPU uses `transposed_product` for at most so many tokens at a time, in models of at
# least this hidden size.
TRANSPOSED_ROWS = 32
TRANSPOSED_SIZE = 512


def fastest(model: ModelConfig, *, backend: str | None = None) -> ModelConfig:
    """The model with the fastest layout for a backend.

    Args:
      backend: "cpu", "gpu" or "tpu"; None is the default of this process.

    Raises:
      InputError: the backend lacks the attention engine that the model names.
    """
    backend = jax.default_backend() if backend is None else backend
    refuse(model, backend=backend)
    unroll = model.num_layers <= UNROLLED.get(backend, 0)
    wide = backend == "cpu" and model.hidden_size >= TRANSPOSED_SIZE
    transposed_rows = TRANSPOSED_ROWS if wide else 0
    return dataclasses.replace(model, unroll=unroll, transposed_rows=transposed_rows)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w, with the gradient of w computed the way that is fastest on the backend.

    A CPU transposes x in memory first: XLA:CPU is slow where both operands contract
    their first dimension, the more so the more columns x has. Milliseconds for
    [1024, k] and [1024, n] without and with it (2 cores of an EPYC, jax 0.10): k 256,
    n 256 0.97 and 0.80; k 1024, n 256 4.5 and 3.0; k 256, n 1024 3.0 and 2.8. Where
    `remat` keeps products in a loop over layers, it takes up to an eighth more memory.
    On other backends, and within `shard_map`, this is x @ w.

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

    XLA:CPU reads weights faster as the first operand. Milliseconds for 8 rows (2 cores
    of an EPYC, jax 0.10) as x @ W of [in, out], as x @ wᵀ, and as here: in 3072, out
    768 0.58, 1.01 and 0.37; in 768, out 3072 0.56, 0.78 and 0.46; a head of 50,304
    tokens 9.8, 11.6 and 6.6. At 64 rows it saves an eighth to a fifth; in narrow models
    little.

    Args:
      x: floats[N, in].
      w: [out, in], of the same dtype.

    Returns:
      f32[N, out].
    """
    y = jnp.matmul(w, x.T, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T  # else XLA undoes both transposes


def apart(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x and w such that XLA:GPU does not merge x w with other products of x.

    To merge products that share an operand, it first concatenates their weights: in a
    decode loop all weights of a layer at every token, for an adapter's few columns.
    """

    def barrier(*factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.optimization_barrier(factors)

    return jax.lax.platform_dependent(
        x, w, cuda=barrier, rocm=barrier, default=lambda *factors: factors
    )


def change_if(flag: jax.Array, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """change(tree) if the flag is True, else the tree itself, to the bit.

    On a CPU this is a `lax.cond`, which writes over donated arrays; with `jnp.where`
    XLA:CPU would first copy every moment of an optimizer. It is `jnp.where` on other
    backends, as a GPU would have to ask its host which branch to launch; outside of
    `jit`, where a branch is compiled at every call; and within `shard_map`, where
    devices may differ. `vmap` turns the branch into a choice.

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
