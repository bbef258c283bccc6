"""A trainer on a mesh hands over its shards; no device ever has a whole leaf."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
import toy_server
from jax.sharding import NamedSharding, PartitionSpec
from test_process_sampler import KEY, PROMPTS, RECIPE, params

from rlhf_jax.algorithms.batch import Request
from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshShape
from rlhf_jax.samplers.process import ProcessSampler
from rlhf_jax.samplers.server import ServerSampler
from rlhf_jax.train.rollouts.outside import OutsideSampler

VERSION = np.int32(2)


@pytest.fixture
def mesh():
    return MeshShape(data=2, fsdp=2).make(jax.devices()[:4])


def sharded(mesh):
    """Every leaf split in halves where possible."""

    def put(leaf):
        axes = ["fsdp" if size % 2 == 0 else None for size in leaf.shape]
        if "fsdp" in axes:
            first = axes.index("fsdp")
            axes = [axis if at == first else None for at, axis in enumerate(axes)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    policy = jax.tree.map(put, params(3))
    kernels = [leaf for leaf in jax.tree.leaves(policy) if leaf.ndim > 1]
    assert not any(leaf.sharding.is_fully_replicated for leaf in kernels)
    return policy


def draw(sampler, policy, mesh):
    where = NamedSharding(mesh, PartitionSpec())
    key, version = jax.device_put((KEY, VERSION), where)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        return sampler(policy, Request(PROMPTS, key, version))


@pytest.mark.slow
def test_a_process_draws_as_for_one_device(mesh):
    rollouts, one = [], ONE_DEVICE.make()
    with ProcessSampler(RECIPE) as process:
        for home, policy in ((one, params(3)), (mesh, sharded(mesh))):
            sampler = OutsideSampler(
                process, home=home, max_new_tokens=RECIPE.max_new_tokens
            )
            rollouts.append(draw(sampler, policy, home))
            assert float(sampler.stats()["policy/sampler_check"][0]) == 0
    assert len(rollouts[1].tokens.sharding.device_set) == 4
    chex.assert_trees_all_equal(*map(jax.device_get, rollouts))


@pytest.mark.slow
def test_the_check_of_a_server_runs_on_the_shards(mesh):
    toy, rollouts, programs = toy_server.Toy(), [], []
    policy = sharded(mesh)
    recipe = dataclasses.replace(RECIPE, max_new_tokens=3, temperature=1.0)
    with toy_server.serving(toy) as url:
        for home, params_of in ((ONE_DEVICE.make(), params(3)), (mesh, policy)):
            server = ServerSampler(url, recipe, tolerance=1e-4, mesh=home)
            check = server._agreement

            def compiled(*args, program=check._logprobs, **kwargs):
                programs.append(program.lower(*args, **kwargs).compile())
                return program(*args, **kwargs)

            check._logprobs = compiled
            with OutsideSampler(server, home=home, max_new_tokens=3) as sampler:
                rollouts.append(draw(sampler, params_of, home))
                assert float(sampler.stats()["policy/sampler_check"][0]) < 1e-5
    assert toy.loads[0] == toy.loads[1]
    chex.assert_trees_all_equal(*map(jax.device_get, rollouts))
    whole, per_device = (
        program.memory_analysis().argument_size_in_bytes for program in programs
    )
    assert per_device < 0.6 * whole
