"""How far trained parameters are from the reference's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import leaves
from rlhf_jax.roles.fingerprint import paths

Array = jax.Array
Params = Any


def weight_drift(params: Params, reference: Params) -> dict[str, Any]:
    """Weight drift Σ_p ‖θ_p - ref_p‖₂ over tensors p, and relative to their size.

    A stacked leaf (one under "layers") is L tensors, one a layer, as in a checkpoint.

    Args:
      params: pytree of arrays of any float dtype.
      reference: of the same structure, stored in any way (`storage.store`).

    Returns:
      "absolute" f32[]: the sum; "relative" f32[]: the sum / Σ_p ‖ref_p‖₂,
      dimensionless; "modules" {path: f32[L] where stacked, else f32[]}:
      ‖θ_p - ref_p‖ / ‖ref_p‖ of every tensor, inf where a tensor of zeros has moved.

    Raises:
      ValueError: the trees differ in structure.
    """
    anchors, structure = jax.tree.flatten(reference, is_leaf=leaves.is_stored)
    if jax.tree.structure(params) != structure:
        raise ValueError(
            f"expected trees of one structure, got leaves {paths(params)} and "
            f"{paths(reference)}; compare a model with what was frozen of it"
        )
    moved, size, modules = [], [], {}
    for path, leaf, anchor in zip(
        paths(params), jax.tree.leaves(params), anchors, strict=True
    ):
        stacked = "layers" in path.split("/")
        anchor = leaves.read(anchor).astype(jnp.float32)
        distance = _norm(leaf.astype(jnp.float32) - anchor, stacked=stacked)
        norm = _norm(anchor, stacked=stacked)
        moved.append(distance.sum())
        size.append(norm.sum())
        modules[path] = jnp.where(distance > 0, distance / norm, 0.0)
    absolute = jnp.stack(moved).sum()
    return {
        "absolute": absolute,
        "relative": absolute / jnp.stack(size).sum(),
        "modules": modules,
    }


def _norm(x: Array, *, stacked: bool) -> Array:
    axes = tuple(range(int(stacked), x.ndim))
    return jnp.sqrt(jnp.square(x).sum(axis=axes))
