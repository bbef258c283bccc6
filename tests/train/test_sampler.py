"""Sampling over another mesh of the policy's devices."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import grpo
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
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
    """The rollout on the policy's mesh, and the sampler's program."""
    params = sharding.place(toys.params(MODEL), mesh=home)
    rows = tuple(length for length in (4, 2, 3, 1) for _ in range(2))
    prompts = row_sharding.put_rows(toys.prompts(rows), mesh=home)
    sampler = Sampler(RECIPE, mesh=mesh, home=home)
    rollout = sampler(params, prompts=prompts, key=sharding.place(KEY, mesh=home))
    compiled = sampler._sample.lower(
        sharding.place(params, mesh=mesh),
        prompts=row_sharding.put_rows(prompts, mesh=mesh),
        key=sharding.place(KEY, mesh=mesh),
        base=None,
    ).compile()
    return rollout, compiled.as_text()


def gathered(text):
    """Shapes of float arrays that every device gets whole."""
    return re.findall(r"= (f32\S+) all-gather\(", text)


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
    assert gathered(trained)
    assert not gathered(text)
