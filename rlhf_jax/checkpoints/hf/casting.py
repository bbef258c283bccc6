"""Casts weights to the dtype of a checkpoint; refuses those that it cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import traverse_util

from rlhf_jax.devices import processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

Leaves = Mapping[str, Any]  # {"layers/mlp/up/kernel": array}
SaveDtype = Literal["float32", "bfloat16", "float16"]
SAVE_DTYPES: tuple[SaveDtype, ...] = ("float32", "bfloat16", "float16")


def of_most(sizes: Mapping[str, int]) -> SaveDtype:
    """Returns the dtype of most entries; a tie goes to the first of `SAVE_DTYPES`.

    Args:
      sizes: {dtype: number of entries}; dtypes not in `SAVE_DTYPES` are ignored.
    """
    return max(SAVE_DTYPES, key=lambda name: sizes.get(name, 0))


def check(leaves: Leaves, *, dtype: SaveDtype | None) -> None:
    """Refuses weights that a dtype cannot hold, before any weight is written.

    All processes must call it.

    Args:
      leaves: arrays by path; sharded ones are not gathered.

    Raises:
      InputError: a finite weight would become infinite; names every such leaf.
    """
    if dtype is None:
        return
    narrow = {
        path: leaf for path, leaf in leaves.items() if _narrows(leaf.dtype, dtype)
    }
    largest = processes.whole(
        {path: _largest_finite(leaf) for path, leaf in narrow.items()}
    )
    problems = [
        f"{path}: up to {float(size):.6g}"
        for path, size in sorted(largest.items())
        if np.isinf(cast(np.asarray(size), dtype))
    ]
    if problems:
        raise InputError(
            f"--save-dtype {dtype}: expected weights of at most "
            f"{float(ml_dtypes.finfo(dtype).max):.6g} in size, the largest number of "
            f"{dtype}, got {len(problems)} tensors with larger ones:\n"
            f"{checks.listed(problems)}\n"
            f"save in {'float32' if dtype == 'bfloat16' else 'bfloat16 or float32'}; "
            f"of a run that has ended so, the newest snapshot has the weights, and "
            f"--resume with another --save-dtype writes them"
        )


def cast_all(
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: SaveDtype | None,
    but: Collection[str] = (),
) -> Iterator[tuple[str, np.ndarray]]:
    """Casts tensors, except those named in `but`; dtype None keeps their own."""
    for name, tensor in tensors:
        yield name, tensor if dtype is None or name in but else cast(tensor, dtype)


def cast(array: np.ndarray, dtype: SaveDtype) -> np.ndarray:
    """Rounds to nearest, ties to even; subnormal numbers are kept."""
    with np.errstate(over="ignore"):  # `check` has found none
        return np.asarray(array).astype(jnp.dtype(dtype), copy=False)


def check_dtype(params: Any, *, dtype: SaveDtype) -> None:
    """Runs `check` on nested dicts."""
    check(traverse_util.flatten_dict(params, sep="/"), dtype=dtype)


def rounded_reward(params: Any, *, dtype: SaveDtype) -> Any:
    """Rounds the trunk of a reward model as `save_reward` does; the result is float32.

    The score is not rounded, so that it can be normalised on the rounded trunk.
    """
    return params | {"trunk": rounded(params["trunk"], dtype=dtype)}


def rounded(params: Any, *, dtype: SaveDtype) -> Any:
    """Rounds parameters to a checkpoint's dtype; the result is float32."""
    if dtype == "float32":
        return params
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf).astype(dtype).astype(jnp.float32), params
    )


def _narrows(stored: Any, dtype: SaveDtype) -> bool:
    """Whether `dtype` cannot hold the largest number of `stored`."""
    return float(jnp.finfo(stored).max) > float(jnp.finfo(dtype).max)


def _largest_finite(leaf: Any) -> Any:
    sizes = jnp.abs(leaf)
    largest = jnp.max(jnp.where(jnp.isfinite(sizes), sizes, 0), initial=0)
    return processes.in_turn(largest)
