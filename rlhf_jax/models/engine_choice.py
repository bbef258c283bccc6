"""Which engine of `attention/` computes whole rows, and why.

`auto` takes xla for short rows, and for long ones the flash attention of the backend
if that can compute the model's: splash on a TPU, cuDNN on an NVIDIA GPU, else the
blockwise engine, which runs everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.axes import CONTEXT_AXIS
from rlhf_jax.models.config import Attention, ModelConfig

# The engines that one backend alone has.
BACKEND: dict[Attention, str] = {"splash": "tpu", "cudnn": "gpu"}
# Columns from which xla's [B, H, S, S] costs more than a loop over blocks, measured on
# CPUs (`experiments/benchmarks/attention.py`).
LONG = 1024
# What takes queries of any columns, as a device has of a row that is cut.
ANY_COLUMNS: tuple[Attention, ...] = ("xla", "blockwise", "splash")
# What computes texts that share a prefix, such as the responses to one prompt.
PREFIXES: tuple[Attention, ...] = ("xla", "blockwise", "cudnn")
CUDNN_HEAD_DIM = 128  # largest that the backward pass takes on every GPU
SPLASH_HEAD_DIM = 64  # what a head's size is a multiple of


class Choice(NamedTuple):
    """An engine, and the reason in words that follow its name."""

    engine: Attention
    reason: str


def choose(
    model: ModelConfig,
    *,
    columns: int,
    backend: str | None = None,
    context: int | None = None,
) -> Choice:
    """The engine for rows of a model.

    Args:
      backend: "cpu", "gpu" or "tpu"; None is that of the mesh that is set, or else the
        default one of this process.
      context: devices that share the columns of a row; None is as on the mesh that is
        set.
    """
    if model.attention != "auto":
        return Choice(model.attention, "as asked")
    mesh = jax.sharding.get_abstract_mesh()
    if backend is None:
        backend = backend_of(mesh)
    sharing: int = dict(mesh.shape).get(CONTEXT_AXIS, 1) if context is None else context
    if columns < LONG:
        return Choice("xla", "as they are short")
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


def obstacle_to(engine: Attention, model: ModelConfig) -> str | None:
    """Why an engine cannot compute a model's attention, on any machine; or None."""
    if engine == "cudnn":
        if model.attention_softcap is not None:
            return "has no soft cap"
        if model.dtype != "bfloat16":
            return f"computes in bfloat16, and the model in {model.dtype}"
        if model.head_dim % 8 or model.head_dim > CUDNN_HEAD_DIM:
            return f"has no kernel for heads of {model.head_dim} numbers"
    if engine == "splash" and model.head_dim % SPLASH_HEAD_DIM:
        return f"has no kernel for heads of {model.head_dim} numbers"
    return None


def refuse(model: ModelConfig, *, backend: str) -> None:
    """Stops where a backend lacks the engine that a model names.

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


def refuse_context(engine: Attention) -> None:
    """Stops where an engine cannot compute a row whose columns are shared.

    Raises:
      InputError: says which engines compute a row whose columns are cut.
    """
    if engine not in (*ANY_COLUMNS, "auto"):
        raise InputError(
            f"expected attention {', '.join(ANY_COLUMNS[:-1])} or {ANY_COLUMNS[-1]} on "
            f"a mesh with a context axis, got {engine}; choose auto, or leave context "
            f"out of the mesh"
        )


def backend_of(mesh: AbstractMesh) -> str:
    """The backend of a mesh, or of this process: "cpu", "gpu" or "tpu"."""
    device = mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform == "cuda" else platform
