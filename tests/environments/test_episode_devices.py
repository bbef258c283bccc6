"""Episodes on several devices equal those on one device."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
import tiny
from toy_episodes import (
    ROWS,
    Script,
    draw,
    drawn,
    params_of,
    prompt_columns_read,
    sampler_of,
    sharing,
)

from rlhf_jax.algorithms.batch import Request
from rlhf_jax.devices import program_cache, sharding
from rlhf_jax.devices.mesh_shape import MeshShape

MESHES = [MeshShape(data=2), MeshShape(data=2, fsdp=2)]
REPLICAS = [MeshShape(tensor=2), MeshShape(data=2, tensor=2), MeshShape(tensor=4)]
SPLIT = {
    name: dataclasses.replace(model, vocab_multiple=4)
    for name, model in (("gpt2", tiny.GPT2), ("mixed", tiny.MIXED))
}


def made(shape):
    return shape.make(jax.devices()[: shape.size])


def check_equal(output, expected):
    """Asserts equal tokens; XLA may round a few rows otherwise than many."""
    for name in ("tokens", "mask", "response_mask", "version", "index", "sample"):
        np.testing.assert_array_equal(
            getattr(output.rollout, name), getattr(expected.rollout, name), err_msg=name
        )
    for name in ("old_logprobs", "entropy"):
        np.testing.assert_allclose(
            getattr(output.rollout, name), getattr(expected.rollout, name), atol=2e-5
        )
    chex.assert_trees_all_equal(output.scores, expected.scores)


@functools.cache
def of_one_device(model):
    return drawn(model, params_of(model), Script())


def check_drawn(model, shape, *, places, replicas):
    params, mesh, expected = params_of(model), made(shape), of_one_device(model)
    slow = Script(latency=lambda row, turn: 0.01 * (ROWS - row))
    sampler = sampler_of(model, slow, places=places, mesh=mesh)
    assert sampler.programs.shares == replicas
    assert sampler.programs.places == -(-places // replicas) * replicas
    for _ in range(2):  # in the cache of the rollout before
        check_equal(draw(sampler, sharding.place(params, mesh=mesh)), expected)
    assert expected.rollout.response_mask.sum() > 2 * ROWS
    return sampler.programs


@pytest.mark.slow
@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("places", [ROWS, 3])
def test_episodes_are_those_of_one_device(shape, places):
    """Four devices have 8 places for 6 rows, or 4 that the rows take in turn."""
    check_drawn(tiny.GPT2, shape, places=places, replicas=shape.size)


@pytest.mark.slow
@pytest.mark.parametrize("shape", REPLICAS, ids=str)
@pytest.mark.parametrize("model", SPLIT.values(), ids=SPLIT)
def test_devices_along_tensor_draw_together(model, shape):
    of_one_device(model)
    before = program_cache.compiled_so_far()
    programs = check_drawn(model, shape, places=ROWS, replicas=shape.data)
    compiled = program_cache.compiled_since(before)
    assert compiled["read"] == compiled["advance"] == 1
    keys, _ = programs._state.caches[0]
    heads = model.num_kv_heads
    split = shape.tensor if heads % shape.tensor == 0 else 1
    assert keys.sharding.shard_shape(keys.shape)[1] == heads // split
    params = sharding.place(params_of(model), mesh=made(shape))
    with programs.holding(params, key=jax.random.key(0)):
        up = programs._weights.layers[0]["mlp"]["up"]["kernel"]
        assert up.sharding.shard_shape(up.shape) == (
            model.hidden_size,
            up.shape[1] // shape.tensor,
        )


@pytest.mark.slow
def test_a_device_reads_a_prompt_that_its_rows_share_once():
    """Rows 0 to 4 share a prompt of five tokens; the first device has rows 0 to 2."""
    params = params_of(tiny.GPT2)
    shared = sharing([0, 0, 0, 0, 0, 3], sample=[0, 1, 2, 3, 4, 0])

    def play(**options):
        sampler = sampler_of(tiny.GPT2, Script(), **options)
        with prompt_columns_read(sampler.programs) as counts:
            output = sampler(params, Request(shared, jax.random.key(7), np.int32(0)))
        return output, sum(counts)

    expected, count_of_one = play()
    output, count = play(mesh=made(MESHES[0]))
    check_equal(output, expected)
    # Of each device one row reads all five, and the others what follows a chunk of 3.
    assert count_of_one == 5 + 4 * 2 + 4
    assert count == (5 + 2 * 2) + (5 + 1 * 2) + 4


@pytest.mark.slow
def test_weights_lie_whole_on_every_device_and_places_apart():
    mesh = made(MESHES[1])
    params = sharding.place(params_of(tiny.GPT2), mesh=mesh)
    programs = sampler_of(tiny.GPT2, Script(), mesh=mesh).programs
    with programs.holding(params, key=jax.random.key(0)):
        for leaf in jax.tree.leaves(programs._weights):
            assert leaf.sharding.device_set == set(mesh.devices.flat)
            assert leaf.sharding.is_fully_replicated
        for leaf in jax.tree.leaves(programs._state):
            assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}
            assert len(leaf.addressable_shards) == 4
        # Nothing is asked of another device, which may have other turns to draw.
        until = np.zeros(4, np.int32)
        advance = programs._advance_program.lower(
            programs._weights, programs._state, until, np.int32(1)
        )
        text = advance.compile().as_text()
        assert "while(" in text
        for exchange in ("all-", "collective", "reduce-scatter"):
            assert exchange not in text
    assert programs._weights is None
    with (
        pytest.raises(KeyError),
        programs.holding(params, key=jax.random.key(0)),
    ):
        raise KeyError
    assert programs._state is None  # what was under way is not gone on with
