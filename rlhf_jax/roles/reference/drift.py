"""Distance of trained parameters from those of the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import masked
from rlhf_jax.models import leaves
from rlhf_jax.models.lora import LoRA, merge
from rlhf_jax.roles.reference.fingerprint import paths
from rlhf_jax.roles.reference.frozen import Frozen, read

Array = jax.Array
Params = Any


def weight_drift(params: Params, reference: Params) -> dict[str, Any]:
    """Weight drift Σ_p ‖θ_p - ref_p‖₂ over tensors p, and relative to their size.

    A stacked leaf (under "layers") counts as L tensors, one per layer, as in a
    checkpoint.

    Returns:
      "absolute" f32[]: the sum; "relative" f32[]: the sum / Σ_p ‖ref_p‖₂;
      "global_norm" f32[]: ‖θ - ref‖₂ / ‖ref‖₂ of all tensors as one vector. "modules"
      {path: {...}} for each leaf, f32[L] if it is stacked, else f32[]: "absolute"
      ‖θ_p - ref_p‖₂, "size" ‖ref_p‖₂, and "relative", their ratio, which is inf if a
      tensor of zeros has moved. Absolute is in the parameters' own unit, the others
      are dimensionless.

    Raises:
      ValueError: the trees differ in structure.
    """
    anchors, structure = jax.tree.flatten(reference, is_leaf=leaves.is_stored)
    if jax.tree.structure(params) != structure:
        raise ValueError(
            f"expected trees of one structure, got leaves {paths(params)} and "
            f"{paths(reference)}; compare a model with what was frozen of it"
        )
    modules = {}
    for path, leaf, anchor in zip(
        paths(params), jax.tree.leaves(params), anchors, strict=True
    ):
        stacked = "layers" in path.split("/")
        # int8 or host leaves are read one at a time, never the whole reference.
        anchor = leaves.read(anchor).astype(jnp.float32)
        moved = _norm(leaf.astype(jnp.float32) - anchor, stacked=stacked)
        size = _norm(anchor, stacked=stacked)
        modules[path] = {
            "absolute": moved,
            # A tensor of zeros that has not moved would be 0/0.
            "relative": jnp.where(moved == 0, 0.0, moved / size),
            "size": size,
        }
    moved, size = (
        jnp.concatenate([module[name].ravel() for module in modules.values()])
        for name in ("absolute", "size")
    )
    return {
        "absolute": moved.sum(),
        "relative": moved.sum() / size.sum(),
        "global_norm": jnp.linalg.norm(moved) / jnp.linalg.norm(size),
        "modules": modules,
    }


def of_policy(
    policy: Params,
    reference: Frozen,
    base: Frozen | None,
    *,
    lora: LoRA | None,
    of_adapters: bool = False,
) -> dict[str, Any]:
    """`weight_drift` of a policy; adapters are merged with their base first.

    Args:
      base: the model under the adapters; None without adapters.
      of_adapters: whether the reference too is adapters over the base, as it is if it
        moves.
    """
    anchor = reference.stored
    if base is None or lora is None:
        return weight_drift(policy, anchor)
    start = read(base)
    if of_adapters:
        anchor = merge(start, anchor, lora=lora)
    return weight_drift(merge(start, policy, lora=lora), anchor)


def stats(drift: dict[str, Any]) -> masked.Stats:
    """The metrics of `weight_drift`, relative to the reference's size."""
    return {
        f"drift/{name}": (drift[name], jnp.ones_like(drift[name]))
        for name in ("relative", "global_norm")
    }


def _norm(x: Array, *, stacked: bool) -> Array:
    axes = tuple(range(int(stacked), x.ndim))
    return jnp.sqrt(jnp.square(x).sum(axis=axes))
