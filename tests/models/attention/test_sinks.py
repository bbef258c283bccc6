"""Attention sinks in every CPU engine, against a softmax with one more logit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models.attention import attend_xla
from rlhf_jax.models.attention.blockwise import attend_blockwise
from rlhf_jax.models.positions import AttentionMask

RNG = np.random.default_rng(0)
B, H, K, S, D = 2, 4, 2, 11, 8
Q, KEYS, V = (
    RNG.normal(size=(B, heads, S, D)).astype(np.float32) for heads in (H, K, K)
)
SINKS = np.array([0.5, -2.0, 3.0, 90.0], np.float32)  # one that takes nearly all
SEGMENTS = np.array([[1] * 5 + [2] * 6, [0] * 3 + [1] * 8], np.int32)


def one_by_one(q, k, v, sinks):
    y = np.zeros(q.shape)
    for b, h, t in np.ndindex(B, H, S):
        seen = [
            s
            for s in range(t + 1)
            if SEGMENTS[b, s] == SEGMENTS[b, t] > 0 and t - s < 4
        ]
        logits = [q[b, h, t] @ k[b, h // 2, s] / D**0.5 for s in seen]
        weights = np.exp(
            np.array([*logits, sinks[h]], float) - max(*logits, sinks[h], 0)
        )
        for s, weight in zip(seen, weights, strict=False):
            y[b, h, t] += weight / weights.sum() * v[b, h // 2, s]
    return y


def run(engine, q, k, v, sinks):
    mask = AttentionMask(segments=jnp.asarray(SEGMENTS), window=4)
    return engine(q, (k, v), mask=mask, sinks=sinks)


@pytest.mark.parametrize("engine", [attend_xla, attend_blockwise])
def test_a_sink_takes_its_share_and_gives_nothing(engine):
    y = jax.jit(lambda *x: run(engine, *x))(Q, KEYS, V, SINKS)
    live = (SEGMENTS > 0)[:, None, :, None]
    expected = one_by_one(Q, KEYS, V, SINKS)
    np.testing.assert_allclose(np.where(live, y, 0), expected, atol=1e-5)


def test_gradients_of_the_engines_agree():
    live = (SEGMENTS > 0)[:, None, :, None]
    above = np.where(live, RNG.normal(size=Q.shape), 0).astype(np.float32)
    of = [
        jax.jit(
            jax.grad(
                lambda *x, engine=engine: (above * run(engine, *x)).sum(),
                argnums=(0, 1, 2, 3),
            )
        )(Q, KEYS, V, SINKS)
        for engine in (attend_xla, attend_blockwise)
    ]
    for mine, other in zip(*of, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    assert (np.abs(of[0][3][:3]) > 1e-3).all()
