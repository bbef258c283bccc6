"""A cache in int8 against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import toys

from rlhf_jax.models.attention import attend_to
from rlhf_jax.models.caches import append, quantise

SHAPE = (2, 2, 6, 8)  # rows, key-value heads, columns, head_dim


def vectors(seed, *, shape=SHAPE):
    return np.random.default_rng(seed).normal(0, 1, shape)


def by_hand(x):
    """round(x / s) · s with s = max|x| / 127 of each vector."""
    scales = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.round(x / np.where(scales > 0, scales, 1)) * scales


def test_attention_reads_what_was_rounded():
    query, key, value = (vectors(seed) for seed in range(3))
    query = query[:, :, :1].repeat(2, axis=1)  # four heads in groups of two
    key[0, 0, 3] = 0  # a scale of 0
    mask = np.random.default_rng(3).random((2, 1, 6)) < 0.7
    mask[:, :, 0] = True
    caches = tuple(
        append(
            (quantise(toys.array(x)),) * 2,
            (toys.array(x[:, :, :1]),) * 2,
            column=0,
        )[0]
        for x in (key, value)
    )
    output = attend_to(toys.array(query), caches, attend=toys.array(mask, bool))
    keys, values = (by_hand(x.astype(np.float32)).repeat(2, 1) for x in (key, value))
    logits = np.einsum("bhtd,bhsd->bhts", query, keys) / np.sqrt(8)
    share = np.exp(np.where(mask[:, None], logits, -np.inf))
    expected = np.einsum(
        "bhts,bhsd->bhtd", share / share.sum(axis=-1, keepdims=True), values
    )
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_a_new_column_is_rounded_and_no_other_is_touched():
    old, new = toys.array(vectors(0)), toys.array(vectors(1)[:, :, :1])
    before = quantise(old)
    after, _ = append((before, before), (new, new), column=4)
    values = np.asarray(after.values * after.scales[..., None])
    np.testing.assert_allclose(
        values[:, :, 4], by_hand(np.asarray(new))[:, :, 0], rtol=1e-5
    )
    others = [0, 1, 2, 3, 5]
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one[:, :, others], other[:, :, others])
    assert after.values.dtype == jnp.int8
