"""Replicas with all weights, in one process and in several."""

import importlib.util
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from rlhf_jax.devices import replicas, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import compiled


def test_a_replica_has_all_weights_and_its_devices_share_them():
    mesh = MeshShape(fsdp=4, tensor=2).make()
    made_of_mesh = replicas.of_mesh(mesh)
    assert (made_of_mesh.num_own, made_of_mesh.num_of_all, made_of_mesh.size) == (
        4,
        4,
        2,
    )
    assert (made_of_mesh.own.devices.reshape(4, 2) == mesh.devices.reshape(4, 2)).all()
    params = tiny.params(tiny.LLAMA)
    sharded = sharding.place(params, mesh=MeshShape(fsdp=8).make())
    placed = replicas.place(sharded, replicas=made_of_mesh)
    up = placed["layers"]["mlp"]["up"]["kernel"]
    assert up.sharding.spec == PartitionSpec(None, None, "tensor")
    chex.assert_trees_all_equal(placed, params)


def test_a_replica_has_whole_what_no_tensor_axis_shares():
    """Also large adapters that fsdp shards, as a replica draws by itself."""
    query = {"lora_a": jax.numpy.ones((1, 2**15, 48))}  # [L, D, r], above SMALL
    params = {"layers": {"attention": {"query": query}}}
    mesh = MeshShape(fsdp=4, tensor=2).make()
    home = sharding.place(params, mesh=mesh)
    placed = replicas.place(home, replicas=replicas.of_mesh(mesh))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed))


def test_every_process_divides_its_own_devices(monkeypatch):
    """The devices of two processes alternate."""
    monkeypatch.setattr(replicas, "Mesh", lambda array, *_, **__: array)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    devices = [SimpleNamespace(process_index=at // 2 % 2, id=at) for at in range(8)]

    def made(**shape):
        array = np.array(devices).reshape(tuple(shape.values()))
        return replicas.of_mesh(SimpleNamespace(devices=array, shape=shape))

    def numbers(groups):
        return [
            [device.id for device in replica]
            for replica in groups.reshape(-1, groups.shape[-1])
        ]

    of_processes = made(data=4, tensor=2)
    assert numbers(of_processes.own) == [[2, 3], [6, 7]]
    assert numbers(of_processes.everyone) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert numbers(made(data=8).own) == [[2], [3], [6], [7]]
    assert numbers(made(data=2, tensor=4).own) == [[2, 3, 6, 7]]
    with pytest.raises(
        InputError, match=r"divide the 4 devices of process 0, .* got 8"
    ):
        made(data=1, tensor=8)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x4"])
def test_hosts_of_a_tpu_slice_have_replicas(topology):
    devices = compiled.slice_of(topology)
    for tensor in (1, 2, 4):
        made_of_mesh = replicas.of_mesh(
            MeshShape(fsdp=16 // tensor, tensor=tensor).make(devices)
        )
        assert made_of_mesh.num_of_all == 16 // tensor
        assert made_of_mesh.num_own * made_of_mesh.size == 4
