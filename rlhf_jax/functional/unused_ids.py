"""Ids of a vocabulary that are not tokens: their probability is 0 in every role.

Embeddings often have more rows than the tokenizer has tokens (Qwen 2.5: 151,936 rows
for 151,665 tokens), and some tokenizers leave holes between their ids. Such ids are
given as ranges (start, stop), in order and apart: a static, hashable value. Under `jit`
they become comparisons with an iota; for an empty tuple nothing here is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

from rlhf_jax.functional.checks import InputError

Array = jax.Array
Ranges = tuple[tuple[int, int], ...]

MOST_COMPARED = 8  # ranges compared one by one; more use a binary search


def beside(used: Iterable[int], *, vocab_size: int) -> Ranges:
    """Returns the ids below `vocab_size` that are not in `used`, as ranges.

    >>> beside([0, 1, 3], vocab_size=6)
    ((2, 3), (4, 6))
    >>> beside(range(6), vocab_size=6)
    ()
    """
    ids = sorted({i for i in used if 0 <= i < vocab_size})
    # From the gaps between used ids: a config may claim a vocabulary of 2**31 ids.
    gaps = zip([-1, *ids], [*ids, vocab_size], strict=True)
    return tuple((one + 1, other) for one, other in gaps if one + 1 < other)


def check(ranges: Ranges, *, vocab_size: int) -> None:
    """Checks that ranges are in order and apart, and do not cover the vocabulary.

    Raises:
      InputError: they are not.

    >>> print(check(((2, 3), (4, 6)), vocab_size=6))
    None
    >>> check(((0, 6),), vocab_size=6)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: unused_ids: expected ranges (start,
        stop) in order and apart, within 0 to 6 and not all of it, got ((0, 6),); make
        them with unused_ids.beside
    """
    edges = [edge for span in ranges for edge in span]
    in_order = all(a < b for a, b in itertools.pairwise(edges))
    pairs = all(len(span) == 2 for span in ranges)
    inside = not edges or (edges[0] >= 0 and edges[-1] <= vocab_size)
    if not (pairs and in_order and inside and count(ranges) < vocab_size):
        raise InputError(
            f"unused_ids: expected ranges (start, stop) in order and apart, within 0 "
            f"to {vocab_size} and not all of it, got {ranges!s:.200}; make them "
            f"with unused_ids.beside"
        )


def listed(ranges: Ranges) -> list[int]:
    """Returns every id in the ranges.

    >>> listed(((2, 3), (4, 6)))
    [2, 4, 5]
    >>> listed(())
    []
    """
    return [i for start, stop in ranges for i in range(start, stop)]


def count(ranges: Ranges) -> int:
    """Counts the ids in the ranges.

    >>> count(((2, 3), (4, 6)))
    3
    >>> count(())
    0
    """
    return sum(stop - start for start, stop in ranges)


def contain(ranges: Ranges, ids: Int32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """True where an id is in one of the ranges.

    >>> print(contain(((2, 3), (4, 6)), jnp.arange(7)))
    [False False  True False  True  True False]
    >>> print(contain((), jnp.arange(2)))
    [False False]
    """
    if len(ranges) > MOST_COMPARED:
        edges = jnp.asarray([edge for span in ranges for edge in span], jnp.int32)
        return jnp.searchsorted(edges, ids, side="right") % 2 == 1
    contained = jnp.zeros(ids.shape, jnp.bool_)
    for start, stop in ranges:
        contained |= (ids >= start) & (ids < stop)
    return contained


def masked(logits: Array, ranges: Ranges) -> Array:
    """Sets the logits of ids in the ranges to -inf.

    Args:
      logits: f32[..., V], one for every id of the vocabulary.

    Returns:
      f32[..., V]. No gradient reaches an id in the ranges.

    >>> print(masked(jnp.zeros(4), ((1, 2),)))
    [  0. -inf   0.   0.]
    >>> print(masked(jnp.zeros(2), ()))
    [0. 0.]
    """
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    unused = contain(ranges, ids).reshape((1,) * (logits.ndim - 1) + ids.shape)
    return jnp.where(unused, -jnp.inf, logits)
