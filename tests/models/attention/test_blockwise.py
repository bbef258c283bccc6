"""Blockwise attention: skipped blocks, memory, devices, and use in a decoder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rlhf_jax import policy
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models.attention import attend_xla, blockwise_passes
from rlhf_jax.models.attention.blockwise import attend_blockwise
from rlhf_jax.models.attention.blockwise_passes import Masked
from rlhf_jax.models.attention.per_device import attend_per_device
from rlhf_jax.models.positions import AttentionMask


def visited(segments, *, prefixes=None, window=None, block=4, of_keys=False):
    """The key blocks that each query block visits."""
    segments, prefixes = (
        jnp.asarray(x, jnp.int32).reshape(1, -1, block)
        for x in (segments, 0 * segments if prefixes is None else prefixes)
    )
    columns = jnp.arange(segments.size, dtype=jnp.int32).reshape(-1, block)
    masked = Masked(
        segments_q=segments,
        prefixes_q=prefixes,
        segments_k=segments,
        columns_q=columns,
        columns_k=columns,
        window=jnp.int32(segments.size if window is None else window),
    )
    order, count = blockwise_passes.visited(masked, of_keys=of_keys)
    return [
        [int(one) for one in blocks[:many]]
        for blocks, many in zip(order, count, strict=True)
    ]


def test_blocks_that_the_mask_hides_are_skipped():
    one = np.ones(16, int)
    assert visited(one) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert visited(one, of_keys=True) == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    # Of column 4 a window of 4 reaches column 1, and one of 1 its own.
    assert visited(one, window=4) == [[0], [0, 1], [1, 2], [2, 3]]
    assert visited(one, window=1) == [[0], [1], [2], [3]]
    # Texts of 8, 3 and 4 columns, and one of padding.
    packed = np.repeat([1, 2, 3, 0], [8, 3, 4, 1])
    assert visited(packed) == [[0], [0, 1], [2], [2, 3]]
    assert visited(packed, of_keys=True) == [[0, 1], [1], [2, 3], [3]]
    # Blocks of padding alone meet none.
    assert visited(np.repeat([0, 1], [8, 8])) == [[], [], [2], [2, 3]]


def test_responses_to_one_prompt_do_not_visit_each_other():
    segments, prefixes = np.repeat([[1, 2, 3], [0, 1, 1]], [4, 8, 4], axis=1)
    blocks = visited(segments, prefixes=prefixes)
    assert blocks == [[0], [0, 1], [0, 1, 2], [0, 3]]
    blocks = visited(segments, prefixes=prefixes, of_keys=True)
    assert blocks == [[0, 1, 2, 3], [1, 2], [2], [3]]


@pytest.mark.slow
def test_holes_in_a_mask_are_those_of_xla():
    """Values are right also for interleaved texts; none of their blocks is skipped."""
    rng = np.random.default_rng(0)
    segments = jnp.asarray(rng.integers(0, 4, (2, 40)), jnp.int32)
    query, key, value = rng.normal(size=(3, 2, 2, 40, 4)).astype(np.float32)
    mask = AttentionMask(segments=segments)
    output = jax.jit(functools.partial(attend_blockwise, block=8))(
        query, (key, value), mask=mask
    )
    expected = jax.jit(attend_xla)(query, (key, value), mask=mask)
    token = np.asarray(segments > 0)[:, None, :, None]
    np.testing.assert_allclose(output, np.where(token, expected, 0), atol=1e-5)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "one by one"])
def test_a_decoder_s_log_probs_and_gradients_are_those_of_xla(unroll):
    """Local and global layers in one loop, soft caps, grouped heads, packed rows."""
    model = dataclasses.replace(tiny.MIXED, unroll=unroll)
    tokens, mask = tiny.batch((20, 7, 13), 20, side="right")
    segments = np.where(mask, 1 + (np.arange(20) > 9), 0).astype(np.int32)

    @functools.partial(jax.jit, static_argnames="model")
    def run(params, *, model):
        def total(params):
            logprobs = policy.logprobs(
                params,
                model=model,
                tokens=jnp.asarray(tokens),
                mask=jnp.asarray(mask),
                segments=jnp.asarray(segments),
                first_column=10,
            )
            return jnp.where(mask, logprobs, 0).sum(), logprobs

        return jax.value_and_grad(total, has_aux=True)(params)

    params = tiny.params(model)
    blockwise = dataclasses.replace(model, attention="blockwise")
    ((_, output), gradient), ((_, expected), other) = (
        run(params, model=shape) for shape in (blockwise, model)
    )
    np.testing.assert_allclose(output[mask], expected[mask], atol=1e-4)
    assert (np.abs(expected[:, 11:][mask[:, 11:]]) > 1e-3).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        gradient,
        other,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_devices_compute_their_own_rows_and_heads(kv_heads):
    """Nothing is gathered; a key head is repeated on the devices of its queries."""
    rng = np.random.default_rng(0)
    query, weights = rng.normal(size=(2, 4, 4, 24, 4)).astype(np.float32)
    key, value = rng.normal(size=(2, 4, kv_heads, 24, 4)).astype(np.float32)
    segments = np.array([[1] * 24, [0] * 9 + [1] * 9 + [2] * 6] * 2, np.int32)
    prefixes = jnp.asarray(segments // 2)
    engine = functools.partial(attend_blockwise, block=8)

    def with_gradient(engine, window):
        def total(query, key, value, segments, window):
            mask = AttentionMask(segments=segments, prefixes=prefixes, window=window)
            return (engine(query, (key, value), mask=mask) * weights).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(
            query, key, value, segments, window
        )

    plain = with_gradient(engine, jnp.int32(7))
    with jax.set_mesh(MeshShape(data=2, fsdp=2, tensor=2).make()):
        split = with_gradient(
            functools.partial(attend_per_device, engine=engine), jnp.int32(7)
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        split,
        plain,
    )


@pytest.mark.slow
def test_memory_grows_with_the_columns_and_not_with_their_square():
    def temporaries(size):
        def total(query, key, value):
            mask = AttentionMask(segments=jnp.ones((1, size), jnp.int32))
            return attend_blockwise(query, (key, value), mask=mask).sum()

        array = jax.ShapeDtypeStruct((1, 4, size, 32), jnp.float32)
        gradient = jax.jit(jax.grad(total, (0, 1, 2)))
        program = gradient.lower(array, array, array).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(8192) < 4.2 * temporaries(2048)
