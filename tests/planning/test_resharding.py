"""Bytes that chips receive to reshard a policy, by hand and by a loop over elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import decoder
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import config
from rlhf_jax.planning import measured, resharding
from rlhf_jax.planning.chips import CHIPS
from rlhf_jax.planning.cost import Cost
from rlhf_jax.planning.measured import Measured, Target
from rlhf_jax.planning.workload import Program

MODEL = config.gpt2(
    vocab_size=128, hidden_size=64, num_layers=2, num_heads=8, max_positions=16
)
FSDP, SAMPLER = MeshShape(fsdp=8), MeshShape(data=4, tensor=2)


@pytest.fixture(scope="module")
def shapes():
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda key: decoder.init(key, model=MODEL), key)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params
    )


def elements(tree, mesh):
    """The set of elements on each device, numbered through all leaves."""
    numbers_of = {device.id: set() for device in mesh.devices.flat}
    begin = 0
    where = sharding.shardings(tree, mesh=mesh)
    for leaf, place in zip(jax.tree.leaves(tree), jax.tree.leaves(where), strict=True):
        numbers = begin + np.arange(leaf.size).reshape(leaf.shape)
        for device, part in place.devices_indices_map(leaf.shape).items():
            numbers_of[device.id].update(numbers[part].ravel().tolist())
        begin += leaf.size
    return [numbers_of[at] for at in sorted(numbers_of)]


@pytest.mark.parametrize("per_node", [None, 4])
def test_what_is_received_is_what_was_lacking(shapes, per_node):
    old, new = (shape.make() for shape in (FSDP, SAMPLER))
    received = resharding.received(shapes, source=old, target=new, per_node=per_node)
    has, needs = elements(shapes, old), elements(shapes, new)
    pairs = list(zip(has, needs, strict=True))
    assert received.bytes == 2 * max(len(after - before) for before, after in pairs)
    assert received.written == 2 * max(map(len, needs))
    across = 0
    for at in range(0, 8, per_node or 8):
        node = slice(at, at + (per_node or 8))
        lacking = set().union(*needs[node]) - set().union(*has[node])
        across = max(across, len(lacking) * 2 / (per_node or 8))
    assert received.across == across
    assert (across > 0) == (per_node is not None)


def test_nothing_is_received_where_a_layout_stays(shapes):
    mesh = FSDP.make()
    received = resharding.received(shapes, source=mesh, target=mesh, per_node=4)
    assert (received.bytes, received.across) == (0, 0.0)


@pytest.mark.slow
def test_seconds_of_both_links(shapes):
    program = Program(
        name="sampling",
        function=lambda tree: tree,
        args=(shapes,),
        reads=(),
        batch=(),
        stage="rollout",
        model_flops=0.0,
        mesh=SAMPLER,
        resharded=(0,),
    )
    target = Target(FSDP.make(), "h100", CHIPS["h100"], "none", per_node=4)
    one = Measured(program, {}, None, Cost())
    row = resharding.described(one, target)
    assert row is not None
    sent, network = row["sent_bytes"], row["network_bytes"]
    assert 0 < network < sent
    assert row["seconds"]["links"] == (sent - network) / 450e9
    assert row["seconds"]["network"] == network / 50e9
    assert row["seconds"]["bound"] == network / 50e9
    at_home = Measured(program._replace(mesh=None, resharded=()), {}, None, Cost())
    assert resharding.described(at_home, target) is None
    assert set(row) == set(measured.described(one, CHIPS["h100"]))
