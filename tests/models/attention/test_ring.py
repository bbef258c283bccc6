"""Ring attention equals the attention of one device."""

import dataclasses
import functools

import attention_cases
import jax
import numpy as np
import pytest

from rlhf_jax import config
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import axes
from rlhf_jax.models.attention import attend, attend_xla, blockwise, ring_attention

ROWS = [0, 1, 2, 3]  # left padding, right padding, none, packed texts
NAMES = "causal", "window, soft cap, grouped heads"
MODEL = dataclasses.replace(
    config.llama(
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=8,
        max_positions=32,
    ),
    attention="ring",
)


def on_mesh(shape, name, *, sinks=None):
    """Output and gradients of a case on a mesh."""
    mesh = shape.make()
    *arrays, weights = (x[ROWS] for x in attention_cases.arrays(name))
    weights = np.where(attention_cases.live(name)[ROWS], weights, 0)
    mask = attention_cases.mask_of(name, rows=ROWS)

    def computed(mask, weights, sinks, *arrays):
        cut = axes.cut_of(len(ROWS))
        room = cut.width(mask.columns) - mask.columns
        mask = mask.replace(segments=axes.padded(mask.segments, room), cut=cut)

        def part(x):  # [B, H, S, d] -> [B·c, H, S'/c, d]
            return cut.balanced_parts(axes.padded(x.swapaxes(1, 2), room)).swapaxes(
                1, 2
            )

        def engine(sinks, query, *keys_values):
            parts = map(part, (query, *keys_values))
            query, *keys_values = parts
            out = attend(query, tuple(keys_values), mask=mask, model=MODEL, sinks=sinks)
            whole = cut.whole_of_balanced(out.swapaxes(1, 2)).swapaxes(1, 2)
            return whole[:, :, : attention_cases.SIZE]

        out, back = jax.vjp(engine, sinks, *arrays)
        return out, back(weights)

    run = sharding.on(mesh, computed)
    weights, *arrays = row_sharding.put_rows((weights, *arrays), mesh=mesh)
    if isinstance(mask.window, int):  # as it would not stay under `jax.jit`
        return jax.jit(functools.partial(run, mask))(weights, sinks, *arrays)
    return jax.jit(run)(mask, weights, sinks, *arrays)


def compare(out, gradients, name):
    expected, of_arrays = attention_cases.expected(name)
    live = attention_cases.live(name)[ROWS]
    np.testing.assert_allclose(
        np.where(live, out, 0), expected[ROWS], rtol=1e-6, atol=1e-6
    )
    _, *of_mine = gradients
    for mine, other in zip(of_mine, of_arrays, strict=True):
        np.testing.assert_allclose(mine, other[ROWS], rtol=1e-5, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(fsdp=2, context=2, tensor=2),
        pytest.param(MeshShape(context=8), marks=pytest.mark.slow),
        pytest.param(MeshShape(data=2, context=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_and_gradients_are_the_oracles(monkeypatch, shape, name):
    """Blocks of 3 columns, so that turns see all, some and none of the keys."""
    monkeypatch.setitem(blockwise.BLOCK, "cpu", 3)
    compare(*on_mesh(shape, name), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [MeshShape(fsdp=2, context=4)], ids=str)
def test_turns_by_splash_are_the_oracles(monkeypatch, shape, name):
    """Windows are computed blockwise, all else by JAX's kernel."""
    interpreted = functools.partial(ring_attention.attend_ring, interpret=True)
    monkeypatch.setattr(ring_attention, "attend_ring", interpreted)
    compare(*on_mesh(shape, name), name)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [False, True])
def test_sinks_are_those_of_one_device(monkeypatch, kernel):
    """Each sink is a logit without a value, beside the keys of all devices."""
    if kernel:
        interpreted = functools.partial(ring_attention.attend_ring, interpret=True)
        monkeypatch.setattr(ring_attention, "attend_ring", interpreted)
    name, sinks = "causal", np.array([0.3, -1.2], np.float32)
    out, gradients = on_mesh(MeshShape(fsdp=2, context=4), name, sinks=sinks)
    live = attention_cases.live(name)[ROWS]
    *arrays, weights = (x[ROWS] for x in attention_cases.arrays(name))
    mask = attention_cases.mask_of(name, rows=ROWS)
    expected, back = jax.vjp(
        lambda sinks, q, *kv: attend_xla(q, tuple(kv), mask=mask, sinks=sinks),
        *(sinks, *arrays),
    )
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-6)
    near(np.where(live, out, 0), np.where(live, expected, 0))
    jax.tree.map(near, gradients, back(np.where(live, weights, 0)))
