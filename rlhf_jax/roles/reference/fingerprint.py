"""A fingerprint of parameters: one digest per leaf, and a root over them.

The digest of a leaf is computed on its devices: every element's bits are mixed with its
global index and the results summed modulo 2^32, twice with different seeds. The sum
does not depend on order, so the digest is exact under any sharding, and devices
exchange only sums. The seeds are hashed from the leaf's path, shape and dtype. A
fingerprint guards against accidents, not against an adversary.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models import leaves

Array = jax.Array
Params = Any
Fetch = Callable[[Array], Any]  # reads an array on the host


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Digests in hex: `root` over all of `leaves`, which are keyed by path."""

    root: str
    leaves: dict[str, str]


def fingerprint(params: Params) -> Fingerprint:
    """Fingerprint of a pytree of arrays; the same under any sharding.

    Equal trees have equal fingerprints. A changed bit, shape, dtype or path changes the
    leaf's digest and the root (one in 2^64 random changes of several elements goes
    unnoticed; a change of a single element never does).
    """
    return named(params, digests(params))


def named(
    params: Params, pairs: Array, *, fetch: Fetch = jax.device_get
) -> Fingerprint:
    """The fingerprint from digests that were computed before."""
    return of_leaves(
        {
            path: in_hex(pair)
            for path, pair in zip(paths(params), fetch(pairs), strict=True)
        }
    )


def of_leaves(by_path: dict[str, str]) -> Fingerprint:
    """The fingerprint from {path: digest in hex}; the root is a hash over them."""
    # Sorted, so that the root does not depend on the order of a dictionary.
    listing = "\n".join(f"{path} {by_path[path]}" for path in sorted(by_path))
    return Fingerprint(
        root=hashlib.sha256(listing.encode()).hexdigest()[:32], leaves=by_path
    )


def in_hex(pair: Any) -> str:
    """A digest, u32[2], in the form of a `Fingerprint`."""
    first, second = pair
    return f"{first:08x}{second:08x}"


def paths(params: Params) -> list[str]:
    """The path of every leaf, such as "layers/mlp/up/kernel".

    It does not depend on the memory or devices of a leaf.
    """
    placed = jax.tree.map(
        lambda leaf: leaf.held if isinstance(leaf, leaves.OnHost) else leaf,
        params,
        is_leaf=leaves.is_stored,
    )
    with_path = jax.tree_util.tree_flatten_with_path(placed)[0]
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in with_path
    ]


def digests(params: Params) -> Array:
    """Digests of every leaf; pure, so jittable.

    Args:
      params: pytree of arrays with elements of 1, 2, 4 or 8 bytes.

    Returns:
      u32[N, 2], a row for every leaf in the order of `paths`.
    """
    by_path = zip(paths(params), jax.tree.leaves(params), strict=True)
    return jnp.stack([digest(jnp.asarray(leaf), path=path) for path, leaf in by_path])


def digest(leaf: Array, *, path: str) -> Array:
    """u32[2], the row of `digests` for the leaf at `path`."""
    # Seeded by identity: equal bits with another path or shape have another digest.
    identity = f"{path}|{leaf.shape}|{leaf.dtype}".encode()
    seeds = np.frombuffer(hashlib.sha256(identity).digest()[:8], np.uint32)
    if jax.typeof(leaf).memory_space != jax.memory.Space.Device:
        leaf = jax.device_put(leaf, jax.memory.Space.Device)  # otherwise a copy
    # A scan of one step is one fused program even outside `jit`, where every operation
    # would otherwise write a whole leaf; its body is compiled once per shape.
    return jax.lax.scan(_words, leaf, jnp.asarray(seeds)[None])[1][0]


def _words(leaf: Array, seeds: Array) -> tuple[Array, Array]:
    """Σ mix(bits ^ place) mod 2^32 for both seeds, in one pass over the leaf.

    `place` mixes a seed with the index along each axis in turn.
    """
    bits = _as_uint32(leaf)
    places = [jnp.full(bits.shape, seed, jnp.uint32) for seed in (seeds[0], seeds[1])]
    for axis in range(bits.ndim):  # by axis: a flat index could pass 2^32
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        places = [_mix(place ^ index) for place in places]
    # One reduction of both: XLA fuses the arithmetic into it. For a `sum` on CPU it
    # would first write the bits of the whole leaf, at 20 times the cost.
    zero = jnp.uint32(0)
    sums = jax.lax.reduce(
        tuple(_mix(bits ^ place) for place in places),
        (zero, zero),
        lambda x, y: (x[0] + y[0], x[1] + y[1]),
        tuple(range(bits.ndim)),
    )
    return leaf, jnp.stack(sums)


def _as_uint32(leaf: Array) -> Array:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    width = leaf.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[min(width, 4)]
    # An 8-byte element becomes two 4-byte elements on a new last axis.
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """The finaliser of MurmurHash3: a bijection in which every bit moves every bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
