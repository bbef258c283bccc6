"""Sampling on another mesh of the policy's devices."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import grpo
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.algorithms.flow import rollout as rollouts
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.roles.reference.frozen import NO_MODELS
from rlhf_jax.train.config.sampler import Here
from rlhf_jax.train.sampler import Sampler

MODEL = dataclasses.replace(toys.LLAMA, num_heads=4, num_kv_heads=2, vocab_multiple=8)
RECIPE = grpo.GRPO(
    model=MODEL,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    group_size=2,
)
KEY = jax.random.key(3)


def sampled(home, mesh):
    """(the rollout on the policy's mesh, the text of the sampler's program)."""
    params = sharding.place(toys.params(MODEL), mesh=home)
    rows = tuple(length for length in (4, 2, 3, 1) for _ in range(2))
    prompts = row_sharding.put_rows(toys.prompts(rows), mesh=home)
    sampler = Sampler(RECIPE, mesh=mesh, home=home)
    rollout = sampler(params, Request(prompts, sharding.place(KEY, mesh=home)))
    compiled = sampler._sample.lower(
        sharding.place(params, mesh=mesh),
        prompts=row_sharding.put_rows(prompts, mesh=mesh),
        key=sharding.place(KEY, mesh=mesh),
        frozen=NO_MODELS,
    ).compile()
    return rollout, compiled.as_text()


def gathered(text):
    """Shapes of gathered float arrays, without those of one number per row."""
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    sizes = [tuple(map(int, dims.split(","))) for dims in shapes]
    return [size for size in sizes if math.prod(size) > 8]


@pytest.mark.slow
def test_the_tokens_are_the_same_and_no_weight_travels_for_a_token():
    home, own = MeshShape(fsdp=8).make(), MeshShape(data=4, tensor=2).make()
    expected, trained = sampled(home, home)
    rollout, text = sampled(home, own)
    np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    np.testing.assert_array_equal(rollout.mask, expected.mask)
    np.testing.assert_allclose(
        rollout.old_logprobs, expected.old_logprobs, rtol=1e-5, atol=1e-5
    )
    assert rollout.tokens.sharding.is_equivalent_to(expected.tokens.sharding, 2)
    # Heads and cache stay where they are; activations are summed, weights are not sent.
    # Of logits each device gets the rows that it draws from, whole.
    assert gathered(trained)
    assert not gathered(text)
    assert re.search(r"= \(?f32\S+.* all-to-all\(", text)


def pairs(rows=64):
    """Prompts in groups of two."""
    of_groups = toys.prompts((4, 2, 3, 1) * (rows // 8))
    return jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=0), of_groups)


def drawn(dtype="float32", *, cache="same", model=MODEL, home=None, mesh=None):
    """A rollout sampled in a storage, and the stored parameters."""
    home = MeshShape(fsdp=1).make(jax.devices()[:1]) if home is None else home
    mesh = home if mesh is None else mesh
    recipe = dataclasses.replace(RECIPE, model=model)
    params = sharding.place(toys.params(model), mesh=home)
    options = Here(dtype=dtype, cache=cache)
    sampler = Sampler(recipe, mesh=mesh, home=home, options=options)
    rollout = sampler(
        params,
        Request(
            row_sharding.put_rows(pairs(), mesh=home), sharding.place(KEY, mesh=home)
        ),
    )
    return jax.device_get((rollout, params))


def recomputed(rollout, params, *, model=MODEL):
    compute = functools.partial(
        rollouts.recompute_logprobs,
        model=model,
        max_new_tokens=toys.SIZE,
        temperature=RECIPE.temperature,
    )
    return jax.jit(compute)(rollout, params).old_logprobs


def rounded(params, dtype):
    """The matrices rounded to another dtype by hand, unsharded."""

    def of(path, leaf):
        matrix = path[0].key in ("embed", "head") or path[-1].key == "kernel"
        if not matrix:
            return leaf
        if dtype == "bfloat16":
            return np.asarray(leaf).astype(jnp.bfloat16)
        axis = -1 if path[0].key in ("embed", "head") else -2
        scale = np.abs(leaf).max(axis=axis, keepdims=True) / np.float32(127)
        return np.round(leaf / scale) * scale

    return jax.tree.map_with_path(of, params)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_tokens_are_those_of_parameters_rounded_by_hand(dtype):
    meshes = MeshShape(fsdp=4, tensor=2).make(), MeshShape(data=4, tensor=2).make()
    rollout, params = drawn(dtype, home=meshes[0], mesh=meshes[1])
    by_hand = rounded(params, dtype)
    sample = jax.jit(functools.partial(grpo.sample, recipe=RECIPE))
    expected = sample(by_hand, prompts=pairs(), key=KEY)
    np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    np.testing.assert_allclose(
        rollout.old_logprobs, expected.old_logprobs, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_bfloat16_weights_change_no_sample_where_activations_are_in_bfloat16():
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    expected, _ = drawn(model=model)
    rollout, _ = drawn("bfloat16", model=model)
    np.testing.assert_array_equal(rollout.tokens, expected.tokens)
    np.testing.assert_array_equal(rollout.old_logprobs, expected.old_logprobs)


@pytest.mark.slow
def test_the_mismatch_of_a_storage_is_what_its_rounding_makes():
    distances = []
    ways = (("float32", "same"), ("bfloat16", "same"), ("int8", "same"))
    for dtype, cache in (*ways, ("float32", "int8")):
        rollout, params = drawn(dtype, cache=cache)
        distance = np.abs(recomputed(rollout, params) - rollout.old_logprobs)
        distances.append(distance[rollout.response_mask].mean())
    assert distances[0] < 1e-6
    assert 1e-4 < distances[1] < distances[2] < 0.05
    assert 1e-4 < distances[3] < 0.05
