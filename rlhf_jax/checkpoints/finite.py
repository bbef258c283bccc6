"""Weights that are numbers: NaN and infinite entries of a checkpoint are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

CHUNK = 1 << 16  # entries looked at together, so that they stay in the cache


class NotFinite(NamedTuple):
    """Entries of an array that are no numbers."""

    nan: int = 0
    infinite: int = 0

    @classmethod
    def of(cls, array: np.ndarray) -> NotFinite:
        """Counts them."""
        if not jnp.issubdtype(array.dtype, jnp.floating) or _all_finite(array):
            return cls()
        return cls(int(np.isnan(array).sum()), int(np.isinf(array).sum()))


def _all_finite(array: np.ndarray) -> bool:
    """As `np.isfinite(array).all()`, which is slow for 16 bits: by the exponents."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(bits.dtype)
    chunks = (bits[at : at + CHUNK] for at in range(0, bits.size, CHUNK))
    return all(((chunk & exponent) != exponent).all() for chunk in chunks)


def refuse(counts: Mapping[str, tuple[NotFinite, int]]) -> None:
    """Raises InputError if there is an entry that is NaN or infinite.

    Args:
      counts: {name of a tensor: (its entries that are, how many it has)}.
    """
    problems = [
        f"{name}: {which.nan} NaN and {which.infinite} infinite of {size} entries"
        for name, (which, size) in sorted(counts.items())
        if any(which)
    ]
    if problems:
        raise InputError(
            f"expected finite weights, got {len(problems)} tensors with NaN or "
            f"infinite entries:\n{checks.listed(problems)}\n"
            f"fetch the checkpoint again, or take one of before the run that wrote it "
            f"diverged"
        )
