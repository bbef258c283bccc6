"""Low-rank adapters: y = x W + (alpha / rank) · x A B, with W frozen and A, B trained.

    {"layers": {"attention": {"query": {"lora_a": f32[L, in, r],
                                        "lora_b": f32[L, r, out]}}}}

`attach` puts them beside the kernels that they adapt, which may be stored in any way
(`leaves.py`); the decoder applies them. A scalar model has {"trunk": adapters,
"score": ...}: its score head is trained in full, over the same base.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.typing import DTypeLike

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder, leaves
from rlhf_jax.models.config import ModelConfig

Array = jax.Array
Params = Any
Flat = dict[str, Any]  # Params by path, "layers/mlp/up/kernel"

_LAYERS, _KERNEL = "layers/", "/kernel"


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which linear layers are adapted, and how; there is no dropout."""

    rank: int = 16
    """Rank r of the adapters: columns of A and rows of B."""
    alpha: float = 32.0
    """Scale α of the adapters: their output is multiplied by α / rank."""
    modules: tuple[str, ...] = ("*",)
    """Layers that get adapters, such as attention/query or mlp/*."""

    def __post_init__(self) -> None:
        checks.positive(rank=self.rank, alpha=self.alpha)
        if not self.modules:
            raise InputError(
                "modules: expected at least one pattern of layers to adapt, got none; "
                "'*' adapts every linear layer"
            )

    @property
    def scale(self) -> float:
        """alpha / rank, dimensionless."""
        return self.alpha / self.rank


def targets(*, model: ModelConfig, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """The layers that are adapted, {"attention/query": (in, out)}.

    A mixture has one adapter per expert, {"experts/up": (E, in, out)}.

    Raises:
      InputError: a pattern matches no linear layer of this model (lists its layers); or
        the rank is above the smaller width of a layer, where A B would have more
        parameters than W and no higher rank (names these layers).
    """
    linear = {path: shape[1:] for path, shape in _kernels(model).items()}
    for pattern in lora.modules:
        if not fnmatch.filter(linear, pattern):
            raise InputError(
                f"modules: expected patterns of the linear layers of this "
                f"{model.family}, {', '.join(sorted(linear))}; got {pattern!r}, which "
                f"matches none"
            )
    adapted = {
        path: shape
        for path, shape in linear.items()
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in lora.modules)
    }
    widths = {path: shape[-2:] for path, shape in adapted.items()}
    narrow = {path: shape for path, shape in widths.items() if lora.rank > min(shape)}
    if narrow:
        least = min(min(shape) for shape in narrow.values())
        listed = ", ".join(
            f"{path} ({rows} x {columns})"
            for path, (rows, columns) in sorted(narrow.items())
        )
        raise InputError(
            f"--lora: expected a rank of at most the smaller width of every adapted "
            f"layer, {least}, got {lora.rank}, which is above that of {listed}; lower "
            f"the rank, or leave these out of modules="
        )
    return adapted


def init(key: Array, *, model: ModelConfig, lora: LoRA) -> Params:
    """Adapters that change nothing yet: A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0.

    Returns:
      {"layers": {..., "lora_a": f32[L, in, rank], "lora_b": f32[L, rank, out]}}; for
      experts f32[L, E, in, rank] and f32[L, E, rank, out].

    Raises:
      InputError: no layer matches `lora.modules`, or the rank is above the smaller
        width of an adapted layer.
    """
    adapted, kernels = targets(model=model, lora=lora), _kernels(model)
    adapters: Flat = {}
    keys = jax.random.split(key, len(adapted))
    for one, (path, shape) in zip(keys, adapted.items(), strict=True):
        num_layers, (*experts, size_in, size_out) = kernels[path][0], shape
        down = (num_layers, *experts, size_in, lora.rank)
        up = (num_layers, *experts, lora.rank, size_out)
        bound = 1 / math.sqrt(size_in)
        adapters[f"{_LAYERS}{path}/lora_a"] = jax.random.uniform(
            one, down, jnp.float32, minval=-bound, maxval=bound
        )
        # B = 0: the adapted model starts as its base, with a KL of 0 to it.
        adapters[f"{_LAYERS}{path}/lora_b"] = jnp.zeros(up, jnp.float32)
    return _nested(adapters)


def attach(base: Params, adapters: Params, *, lora: LoRA) -> Params:
    """The parameters of the adapted model, for a forward pass.

    Args:
      base: parameters of a decoder, stored in any way; the result shares its leaves.
      adapters: of a decoder, or of a scalar model {"trunk", "score"}.

    Returns:
      base with `lora_a` and scaled `lora_b` beside the adapted kernels, as "trunk"
      beside "score" for a scalar model.

    Raises:
      InputError: adapters do not fit this base or `lora`; names all of them.
    """
    if "score" in adapters:
        trunk = attach(base, adapters["trunk"], lora=lora)
        return {"trunk": trunk, "score": adapters["score"]}
    _check(base, adapters, lora=lora)
    # The scale goes into B once per program, not into every layer's product.
    scaled = {
        path: lora.scale * leaf if path.endswith("/lora_b") else leaf
        for path, leaf in _flat(adapters).items()
    }
    return _nested(_flat(base) | scaled)


def merge(
    base: Params,
    adapters: Params,
    *,
    lora: LoRA,
    rounded_to: DTypeLike | None = None,
) -> Params:
    """Plain parameters W + (alpha / rank) · A B, which `hf.save` can write.

    Args:
      rounded_to: dtype that the caller casts the result to. Adapted kernels of another
        dtype are returned in float32, so that they are rounded only once.

    Returns:
      Arrays on the device, in the dtypes of base. Plain arrays of base that are not
      adapted are returned as they are: copy before donating.

    Raises:
      InputError: adapters do not fit this base or `lora`; names all of them.
    """
    if "score" in adapters:
        trunk = merge(base, adapters["trunk"], lora=lora, rounded_to=rounded_to)
        return {"trunk": trunk, "score": adapters["score"]}
    return _moved(base, adapters, lora=lora, scale=lora.scale, rounded_to=rounded_to)


def unmerge(merged: Params, adapters: Params, *, lora: LoRA) -> Params:
    """The base of merged parameters, up to rounding: W - (alpha / rank) · A B.

    Returns:
      Parameters of a decoder, without a score head.

    Raises:
      InputError: adapters do not fit these parameters or `lora`; names all of them.
    """
    if "score" in adapters:
        return unmerge(merged["trunk"], adapters["trunk"], lora=lora)
    return _moved(merged, adapters, lora=lora, scale=-lora.scale)


def changes_nothing(adapters: Params) -> Array:
    """bool[], True if every B is 0, so that the adapted model equals its base."""
    flat = _flat(adapters)
    ups = [(leaf == 0).all() for path, leaf in flat.items() if path.endswith("lora_b")]
    return jnp.stack(ups).all()


def paths(adapters: Params) -> list[str]:
    """Paths of the adapted layers, such as "attention/query"."""
    suffix = "/lora_a"
    return [
        path.removeprefix(_LAYERS).removesuffix(suffix)
        for path in _flat(adapters)
        if path.endswith(suffix)
    ]


def _kernels(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{"attention/query": [L, in, out]} of the layers that have it."""
    return {
        path.removeprefix(_LAYERS).removesuffix(_KERNEL): leaf.shape
        for path, leaf in _flat(decoder.shapes(model)).items()
        if path.startswith(_LAYERS) and path.endswith(_KERNEL)
    }


def _moved(
    base: Params,
    adapters: Params,
    *,
    lora: LoRA,
    scale: float,
    rounded_to: DTypeLike | None = None,
) -> Params:
    _check(base, adapters, lora=lora)
    moved, flat = _flat(leaves.read(base)), _flat(adapters)
    for path in paths(adapters):
        at = f"{_LAYERS}{path}"
        kernel = moved[at + _KERNEL]
        # Full precision, as the merged weights are saved: TF32 would round them.
        change = jnp.matmul(
            flat[f"{at}/lora_a"], flat[f"{at}/lora_b"], precision="highest"
        )
        keeps_dtype = rounded_to is None or kernel.dtype == rounded_to
        moved[at + _KERNEL] = (kernel + scale * change).astype(
            kernel.dtype if keeps_dtype else jnp.float32
        )
    return _nested(moved)


def _check(base: Params, adapters: Params, *, lora: LoRA) -> None:
    kernels, flat = _flat(base), _flat(adapters)
    expected = {}
    for path in paths(adapters):
        at = f"{_LAYERS}{path}"
        if at + _KERNEL in kernels:
            kernel = jax.eval_shape(leaves.read, kernels[at + _KERNEL])
            *stacked, size_in, size_out = kernel.shape
            expected[f"{at}/lora_a"] = (*stacked, size_in, lora.rank)
            expected[f"{at}/lora_b"] = (*stacked, lora.rank, size_out)
    if problems := leaves.misfits(flat, shapes=expected):
        raise InputError(
            f"expected adapters of rank {lora.rank} for the layers of this base, got "
            f"others; were they made for another model or with another LoRA?\n  "
            + "\n  ".join(problems)
        )


def _flat(tree: Params) -> Flat:
    flat: Any = traverse_util.flatten_dict(tree, sep="/")
    return flat


def _nested(flat: Flat) -> Params:
    return traverse_util.unflatten_dict(flat, sep="/")
