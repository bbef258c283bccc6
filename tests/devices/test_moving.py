"""One program on all devices moves arrays from some devices to others.

Here the program runs in one process; `programs/rows_of_processes.py` uses two.
"""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.devices import moving

DTYPES = (np.float32, ml_dtypes.bfloat16, np.int8, bool, np.int32)


def mesh(*devices, shape, names):
    chosen = [jax.devices()[number] for number in devices]
    return Mesh(np.array(chosen).reshape(shape), names)


OLD = mesh(0, 1, 4, 5, shape=(2, 2), names=("a", "b"))
NEW = mesh(2, 3, 6, 7, shape=(4,), names=("c",))
FEW = mesh(3, 7, shape=(2,), names=("c",))
ACROSS = mesh(5, 6, shape=(2,), names=("c",))  # one of them is of both


def numbers(*shape, dtype=np.float32):
    drawn = np.random.default_rng(0).normal(scale=50, size=shape).astype(dtype)
    if dtype in (np.float32, ml_dtypes.bfloat16):
        # What sums of numbers would lose: the sign of a zero, and what NaN carries.
        drawn.reshape(-1)[:3] = -0.0, np.inf, np.nan
    return drawn


def check(array, old, new):
    placed = jax.device_put(array, NamedSharding(*old))
    where = NamedSharding(*new)
    moved = moving._program(placed.shape, placed.dtype, placed.sharding, where)(placed)
    assert moved.sharding == where
    assert moved.dtype == array.dtype
    assert np.asarray(moved).tobytes() == array.tobytes()
    for shard in moved.addressable_shards:
        assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes()


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "new",
    [
        (NEW, PartitionSpec(None, "c")),
        (FEW, PartitionSpec("c")),
        (ACROSS, PartitionSpec()),
    ],
    ids=("four", "two", "across"),
)
def test_every_bit_comes_to_its_device(dtype, new):
    array = numbers(6, 8, dtype=dtype)
    check(array, (OLD, PartitionSpec("a", "b")), new)
    check(array, (OLD, PartitionSpec(None, ("a", "b"))), new)
    check(array, (OLD, PartitionSpec()), new)  # of which one device writes


def test_stacks_of_layers_and_scalars():
    """Layers move one at a time, except where the layer axis is sharded."""
    stack = numbers(4, 8, 4)
    check(stack, (OLD, PartitionSpec(None, "b", "a")), (NEW, PartitionSpec(None, "c")))
    check(stack, (OLD, PartitionSpec("a")), (NEW, PartitionSpec("c")))
    check(np.float32(-0.0), (OLD, PartitionSpec()), (NEW, PartitionSpec()))


def test_one_process_leaves_it_to_jax(monkeypatch):
    monkeypatch.setattr(moving, "_program", None)
    placed = jax.device_put(numbers(8, 4), NamedSharding(OLD, PartitionSpec("a")))
    moved = moving.move(placed, NamedSharding(NEW, PartitionSpec("c")))
    np.testing.assert_array_equal(moved, placed)
