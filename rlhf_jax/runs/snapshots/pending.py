"""States with arrays that are still to come: what another thread draws."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import jax

PyTree = Any


def settled(state: PyTree) -> PyTree:
    """The state with the result of each `Future` in its place, waiting for it.

    Raises whatever the work behind a future raised.
    """
    return jax.tree.map(
        lambda leaf: leaf.result() if isinstance(leaf, Future) else leaf, state
    )


def is_settled(state: PyTree) -> bool:
    """Whether `settled` would not wait, and would not raise."""
    futures = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, Future)]
    return all(future.done() and future.exception() is None for future in futures)
