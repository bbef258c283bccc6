"""Snapshots are restored to the last bit, completely or not at all."""

import errno
import json
import os
import shutil
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import toys
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax import frozen
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.snapshots import integrity
from rlhf_jax.runs.snapshots.snapshots import Snapshots, _flat, _raw
from rlhf_jax.runs.write_errors import WriteError


@flax.struct.dataclass
class State:
    params: dict
    optimizer: tuple
    key: jax.Array
    step: jax.Array
    critic: dict | None


class Moments(NamedTuple):
    mean: jax.Array
    rest: tuple


def example() -> State:
    """Every kind of leaf and node in a run's state, with awkward values."""
    weights = jnp.array([jnp.nan, -0.0, 1e-42, jnp.inf, 1 / 3], jnp.float32)
    params = {
        "a.b/c['d']": weights,
        "bf16": weights.astype(jnp.bfloat16),
        "int8": jnp.arange(-3, 3, dtype=jnp.int8).reshape(2, 3),
        "bool": jnp.array([True, False]),
        "none": None,
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return State(
        params=params,
        optimizer=(
            optimizer.init({"w": weights}),
            Moments(jnp.ones(3), (jnp.zeros(()), ())),
        ),
        key=jax.random.split(jax.random.key(3), 2),
        step=jnp.int32(7),
        critic=None,
    )


def bits(tree) -> list[tuple[str, tuple, bytes]]:
    """dtype, shape and bytes of every leaf: NaN equals NaN, -0 differs from 0."""

    def host(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [
        (str(leaf.dtype), leaf.shape, host(leaf).tobytes())
        for leaf in jax.tree.leaves(tree)
    ]


META = {"stage": "ppo", "fingerprint": "9f", "lr": 1e-5, "none": None, "list": [1, "é"]}


def test_arrays_and_meta_come_back_to_the_last_bit(tmp_path):
    state = example()
    with Snapshots(tmp_path / "snapshots") as snapshots:
        snapshots.save(7, arrays=state, meta=META)
    with Snapshots(tmp_path / "snapshots") as snapshots:
        assert snapshots.latest() == 7
        restored, meta = snapshots.restore(7, like=jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert meta == META
    np.testing.assert_array_equal(
        jax.random.normal(restored.key[1], (3,)), jax.random.normal(state.key[1], (3,))
    )


def test_shapes_alone_say_what_to_restore(tmp_path):
    params = example().params
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, arrays=params, meta={})
        shapes = jax.eval_shape(lambda: params)
        restored, _ = snapshots.restore(1, like=shapes)
    assert bits(restored) == bits(params)


def test_newest_are_kept_by_number(tmp_path):
    with Snapshots(tmp_path, keep=2) as snapshots:
        assert snapshots.latest() is None
        for step in (2, 9, 10, 100):
            snapshots.save(step, arrays={"x": jnp.full(2, step)}, meta={"step": step})
        assert snapshots.latest() == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "100"]
    with Snapshots(tmp_path) as snapshots:
        restored, meta = snapshots.restore(10, like={"x": jnp.zeros(2, jnp.int32)})
    assert restored["x"].tolist() == [10, 10]
    assert meta == {"step": 10}


def test_a_step_that_is_there_is_left_alone(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(3, arrays={"x": jnp.ones(2)}, meta={})
        snapshots.save(3, arrays={"x": jnp.zeros(2)}, meta={})
        restored, _ = snapshots.restore(3, like={"x": jnp.zeros(2)})
    assert restored["x"].tolist() == [1, 1]


def test_donating_the_arrays_after_save_does_not_change_the_snapshot(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    x = jnp.arange(4_000_000, dtype=jnp.float32)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, arrays={"x": x}, meta={})
        assert overwrite(x)[5] == -1
    with Snapshots(tmp_path) as snapshots:
        restored, _ = snapshots.restore(
            1, like={"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}
        )
        np.testing.assert_array_equal(restored["x"], np.arange(4_000_000))
        # And what was restored can be donated, as the first thing a run does with it.
        assert overwrite(restored["x"])[5] == -1


@pytest.mark.slow
def test_arrays_come_back_onto_the_sharding_of_like(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    x = jnp.arange(64.0).reshape(8, 8)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, arrays={"x": jax.device_put(x, rows), "n": x[0]}, meta={})
        like = {"x": jax.device_put(jnp.zeros((8, 8)), columns), "n": jnp.zeros(8)}
        restored, _ = snapshots.restore(1, like=like)
    assert restored["x"].sharding == columns
    np.testing.assert_array_equal(restored["x"], x)
    # An array tied to one device could not meet one that is spread over eight.
    assert not restored["n"].committed
    np.testing.assert_array_equal(
        jax.jit(lambda x, n: x + n[None, :])(restored["x"], restored["n"]), x + x[:1]
    )


def test_a_snapshot_that_does_not_fit_names_its_leaves(tmp_path):
    saved = {
        "policy": {"w": jnp.ones((2, 3)), "old": jnp.ones(1)},
        "step": jnp.int32(0),
    }
    like = {"policy": {"w": jnp.ones((3, 2)), "new": jnp.ones(1)}, "step": jnp.ones(())}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(5, arrays=saved, meta={})
        with pytest.raises(InputError) as error:
            snapshots.restore(5, like=like)
    message = str(error.value)
    assert f"{tmp_path / '5'} does not fit" in message
    for line in (
        "policy/new: expected float32[1], got no such leaf",
        "policy/old: expected no such leaf, got float32[1]",
        "policy/w: expected float32[3,2], got float32[2,3]",
        "step: expected float32[], got int32[]",
    ):
        assert f"\n  {line}\n" in message


def test_a_missing_snapshot_is_named(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(5, arrays={"x": jnp.ones(1)}, meta={})
        with pytest.raises(InputError, match="expected one of 5, got 6"):
            snapshots.restore(6, like={"x": jnp.ones(1)})


def test_a_half_written_snapshot_is_ignored_and_removed(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(5, arrays={"x": jnp.ones(1)}, meta={})
    shutil.copytree(tmp_path / "5", tmp_path / "6.orbax-checkpoint-tmp")
    with Snapshots(tmp_path) as snapshots:
        assert snapshots.latest() == 5
        snapshots.save(7, arrays={"x": jnp.ones(1)}, meta={})
    assert sorted(os.listdir(tmp_path)) == ["5", "7"]


def test_saving_is_silent(tmp_path, capfd):
    with Snapshots(tmp_path) as snapshots:
        for step in range(4):
            snapshots.save(step, arrays={"x": jnp.ones(3)}, meta={})
        snapshots.restore(3, like={"x": jnp.ones(3)})
    assert capfd.readouterr() == ("", "")


def test_a_list_that_cannot_be_written_is_told_once(tmp_path, monkeypatch):
    """The snapshot is complete without the list."""

    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Snapshots(tmp_path) as snapshots:
        monkeypatch.setattr(integrity, "write_list", full)
        snapshots.save(1, arrays={"x": jnp.ones(1)}, meta={})
        with pytest.raises(WriteError, match="1 could not be written: No space left"):
            snapshots.save(2, arrays={"x": jnp.zeros(1)}, meta={})
    with Snapshots(tmp_path) as snapshots:
        assert snapshots.steps() == [1]
        restored, _ = snapshots.restore(1, like={"x": jnp.zeros(1)})
    assert restored["x"].tolist() == [1]


def test_orbax_v1_reads_the_same_bits(tmp_path):
    """Orbax's next API reads today's snapshots."""
    state = example()
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(7, arrays=state, meta=META)
    raw = {path: _raw(leaf) for path, leaf in _flat(state).items()}
    like = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for path, leaf in raw.items()
    }
    read = ocp.v1.load(tmp_path / "7", like, checkpointable_name="arrays")
    assert bits(read) == bits(raw)


def test_meta_is_plain_json_on_disk(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, arrays={"x": jnp.ones(1)}, meta=META)
    file = tmp_path / "1" / "meta" / "metadata"
    saved = json.loads(file.read_text(encoding="utf-8"))
    # With what tells damage from it, see test_damage.py.
    assert saved.pop("digests").keys() == {"arrays", "meta"}
    assert saved == META


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


STORED = {
    "copy": dict,
    "bfloat16": lambda: {"dtype": "bfloat16"},
    "int8": lambda: {"dtype": "int8"},
    "int8 with bf16 tables": lambda: {"dtype": "int8", "embeddings": "bfloat16"},
    "host": lambda: {"memory": "pinned_host"},
    "int8 on the host": lambda: {"dtype": "int8", "memory": "pinned_host"},
    "eight devices": lambda: {"sharding": NamedSharding(mesh(), PartitionSpec())},
    "eight hosts": lambda: {
        "sharding": NamedSharding(mesh(), PartitionSpec()),
        "memory": "pinned_host",
    },
    "another device": lambda: {
        "sharding": jax.sharding.SingleDeviceSharding(jax.devices()[3])
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            how,
            id=name,
            marks=[pytest.mark.slow] * (name not in ("copy", "int8 on the host")),
        )
        for name, how in STORED.items()
    ],
)
def test_a_frozen_model_comes_back_as_it_is_stored(tmp_path, how):
    """Its bits, memory, devices and commitment to them, in every storage."""
    reference, other = (
        frozen.freeze(toys.weights(seed=seed), **how()) for seed in (0, 1)
    )
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, arrays={"reference": reference}, meta={})
    with Snapshots(tmp_path) as snapshots:
        restored, _ = snapshots.restore(1, like={"reference": other})
    restored_reference = restored["reference"]
    assert jax.tree.structure(restored_reference) == jax.tree.structure(reference)
    assert bits(restored_reference) == bits(reference) != bits(other)
    for new, old in zip(
        jax.tree.leaves(restored_reference), jax.tree.leaves(reference), strict=True
    ):
        assert new.sharding == old.sharding  # with its memory kind
        assert new.committed == old.committed
    frozen.verify(restored_reference)
