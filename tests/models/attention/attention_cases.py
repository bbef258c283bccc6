"""Masks of every family on few columns, with the oracle's results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles

from rlhf_jax.models.axes import Cut, balanced
from rlhf_jax.models.positions import AttentionMask

SIZE = 29
# Left padding, right padding, none, packed texts with padding around, padding alone.
SEGMENTS = np.zeros((5, SIZE), np.int32)
SEGMENTS[0, 6:] = 1
SEGMENTS[1, :20] = 1
SEGMENTS[2] = 1
SEGMENTS[3, 1:9], SEGMENTS[3, 9:10], SEGMENTS[3, 10:27] = 1, 2, 3
# The second and the third of the packed texts go on from the first.
PREFIXES = np.where(SEGMENTS > 1, 1, 0).astype(np.int32)
CASES = {
    # heads, key heads, queries, and the mask's options
    "causal": (2, 2, SIZE, {}),
    "window, soft cap, grouped heads": (
        *(4, 2, SIZE),
        {"window": 4, "softcap": 1.5, "scale": 0.7},
    ),
    "later queries, traced window": (4, 1, 18, {"window": np.int32(9)}),
    "shared prefix": (4, 2, SIZE, {"prefixes": PREFIXES}),
}


@functools.cache
def arrays(name, *, head_dim=6):
    """(query, key, value, gradient of the output), of mean 0 and variance 1."""
    heads, kv_heads, queries, _ = CASES[name]
    rng = np.random.default_rng(0)
    shapes = [(heads, queries), (kv_heads, SIZE), (kv_heads, SIZE), (heads, queries)]
    return tuple(
        rng.normal(size=(len(SEGMENTS), *shape, head_dim)).astype(np.float32)
        for shape in shapes
    )


@functools.cache
def expected(name):
    query, key, value, gradient = arrays(name)
    options = CASES[name][3]
    return oracles.attention(
        query,
        key,
        value,
        SEGMENTS,
        window=options.get("window"),
        scale=options.get("scale", query.shape[-1] ** -0.5),
        softcap=options.get("softcap"),
        gradient=gradient,
        prefixes=options.get("prefixes"),
    )


def mask_of(name, *, rows=slice(None), packed=True):
    """The mask record; its window is traced where the case says so."""
    options = dict(CASES[name][3])
    if isinstance(options.get("window"), np.int32):
        options["windows"] = int(options["window"]), SIZE
    return AttentionMask(segments=jnp.asarray(SEGMENTS[rows]), packed=packed, **options)


def live(name):
    """bool[B, 1, T, 1], whether each query is a token."""
    return (SEGMENTS > 0)[:, None, SIZE - CASES[name][2] :, None]


def in_shares(engine, *, count=2):
    """The engine, applied to the queries of one device after another."""

    def attend(query, keys_values, *, mask):
        room = -SIZE % (2 * count)
        columns = balanced(SIZE + room, count=count).reshape(count, -1)
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0)))
            for x in (query, *keys_values)
        )
        mask = mask.replace(
            segments=jnp.pad(mask.segments, ((0, 0), (0, room))), cut=Cut((), count)
        )
        parts = [
            engine(
                query[:, :, columns[share]],
                (key, value),
                mask=mask.replace(share=jnp.int32(share)),
            )
            for share in range(count)
        ]
        whole = jnp.concatenate(parts, axis=2)
        return whole[:, :, np.argsort(columns.reshape(-1))][:, :, :SIZE]

    return attend


def with_gradients(engine, name):
    """Compiles a function of query, key and value: the output and three gradients.

    The output's gradient is 0 at padding, as no caller reads the output there.
    """
    weights = np.where(live(name), arrays(name)[3], 0)

    def both(query, key, value, mask):
        out, back = jax.vjp(
            lambda query, key, value: engine(query, (key, value), mask=mask),
            *(query, key, value),
        )
        return out, back(weights.astype(out.dtype))

    mask = mask_of(name)
    if isinstance(mask.window, int):  # as it would not stay under `jax.jit`
        return jax.jit(functools.partial(both, mask=mask))
    return functools.partial(jax.jit(both), mask=mask)


def poisoned(name, *, by):
    """The arrays with `by` in every padded column."""
    *rest, _ = arrays(name)
    token = (SEGMENTS > 0)[:, None, :, None]
    return [np.where(token[:, :, -x.shape[2] :], x, np.float32(by)) for x in rest]
