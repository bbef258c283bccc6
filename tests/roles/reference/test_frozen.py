"""Storage, fingerprints and frozen models: every possible change is detected."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import one_in

from rlhf_jax import fingerprint, frozen
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import ReferenceMovedError

RNG = np.random.default_rng(0)
digests = jax.jit(fingerprint.digests)


def small():
    """Fresh arrays at every call, as tests donate or change some of them."""
    rng = np.random.default_rng(0)
    return {
        "embed": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        "layers": {
            "a": jnp.asarray(rng.normal(size=(2, 8, 8)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=(2, 8, 8)), jnp.float32),
        },
        "half": jnp.asarray(rng.normal(size=(8,)), jnp.bfloat16),
        "count": jnp.arange(8, dtype=jnp.int32),
        "scalar": jnp.float32(0.5),
    }


def on_host(tree):
    return jax.tree.map(np.array, tree)


def assert_equal(output, expected):
    chex.assert_trees_all_equal(output, expected)


def mesh_of(*shape):
    names = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("dtype", one_in(2, [None, "float32", "bfloat16"]))
@pytest.mark.parametrize("sharded", one_in(2, [True, False]))
def test_a_copy_outlives_the_donation_of_its_source(dtype, sharded):
    source = small()
    sharding = None
    if sharded:  # the very sharding that the source has
        sharding = NamedSharding(mesh_of(8), PartitionSpec())
        source = jax.device_put(source, sharding)
    expected = on_host(storage.store(source, dtype=dtype))
    reference = frozen.freeze(source, dtype=dtype, sharding=sharding)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)(source)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(source))
    assert_equal(on_host(reference.stored), expected)
    frozen.verify(reference)


def test_a_copy_of_numpy_does_not_see_writes_to_it():
    # Aligned as XLA likes it, so that a zero-copy view would be taken if one could.
    buffer = np.zeros(4096 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    source = {"w": buffer[start : start + 4096].view(np.float32)}
    reference = frozen.freeze(source)
    source["w"][:] = 7.0
    np.testing.assert_array_equal(reference.stored["w"], 0.0)
    frozen.verify(reference)


def test_storage_dtype_is_of_floats_alone():
    stored = storage.store(small(), dtype="bfloat16")
    assert stored["embed"].dtype == stored["half"].dtype == jnp.bfloat16
    assert stored["count"].dtype == jnp.int32
    assert_equal(stored["count"], small()["count"])
    np.testing.assert_allclose(
        np.asarray(stored["embed"], np.float32), small()["embed"], rtol=2**-8
    )
    expected = 2 * (16 * 8 + 2 * 2 * 8 * 8 + 8 + 1) + 4 * 8
    assert storage.nbytes(stored) == expected


def test_storage_has_a_sharding_of_its_own():
    rows = NamedSharding(mesh_of(8), PartitionSpec("x"))
    source = {"w": jnp.arange(16.0)}
    reference = frozen.freeze(source, sharding=rows)
    assert reference.stored["w"].sharding == rows
    assert frozen.freeze(reference.stored).stored["w"].sharding == rows
    assert frozen.fingerprint_of(reference) == fingerprint.fingerprint(source)
    frozen.verify(reference)


def test_nothing_to_freeze():
    with pytest.raises(InputError, match="expected parameters to freeze, got an empty"):
        frozen.freeze({})


def test_no_gradient_reaches_a_frozen_model():
    floats = {"w": jnp.arange(1.0, 4.0), "half": jnp.ones(3, jnp.bfloat16)}
    reference = frozen.freeze(floats)

    def objective(trained, stored):
        read = frozen.read(reference.replace(stored=stored))
        return jnp.sum(trained * read["w"] * read["half"].astype(jnp.float32))

    ours, theirs = jax.grad(objective, (0, 1))(jnp.ones(3), floats)
    np.testing.assert_array_equal(ours, [1.0, 2.0, 3.0])
    assert not any(np.asarray(leaf, np.float32).any() for leaf in theirs.values())


def test_training_the_source_leaves_the_reference():
    """With weight decay and donation, only the policy moves."""
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    trained = storage.store(toys.weights())
    reference = frozen.freeze(trained)
    before = on_host(reference.stored)

    def step(params, opt):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    trained, _ = jax.jit(step, donate_argnums=(0, 1))(trained, optimizer.init(trained))
    assert_equal(on_host(reference.stored), before)
    frozen.verify(reference)
    with pytest.raises(ReferenceMovedError, match="got others in embed/positions, emb"):
        frozen.verify(reference.replace(stored=trained))


def flip_a_bit(leaf, place, bit):
    raw = np.array(leaf)
    raw.view(np.uint8).reshape(-1)[place] ^= np.uint8(1 << bit)
    return jnp.asarray(raw)


CHANGES = {
    "the last bit of a float32": ("embed", lambda x: flip_a_bit(x, 4 * 37, 0)),
    "a sign": ("layers/a", lambda x: flip_a_bit(x, 4 * 5 + 3, 7)),
    "a bit of a bfloat16": ("half", lambda x: flip_a_bit(x, 2 * 3, 0)),
    "an integer": ("count", lambda x: x.at[2].add(1)),
    "a scalar": ("scalar", lambda x: x + 1e-7),
    "two elements swapped": (
        "embed",
        lambda x: x.at[0, 0].set(x[0, 1]).at[0, 1].set(x[0, 0]),
    ),
    "rows turned": ("embed", lambda x: jnp.roll(x, 1, axis=0)),
    "layers swapped": ("layers/b", lambda x: x[::-1]),
    "a shape": ("embed", lambda x: x.reshape(8, 16)),
    "a dtype": ("count", lambda x: x.astype(jnp.uint32)),
}


@pytest.mark.cases(quick=5)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_verify_names_the_leaf_that_moved(change):
    path, move = change
    reference = frozen.freeze(small())
    moved = {**reference.stored, "layers": dict(reference.stored["layers"])}
    *above, name = path.split("/")
    owner = moved[above[0]] if above else moved
    owner[name] = move(owner[name])
    with pytest.raises(ReferenceMovedError) as error:
        frozen.verify(reference.replace(stored=moved))
    assert f"got others in {path}. Something wrote" in str(error.value)
    assert frozen.fingerprint_of(reference).root in str(error.value)


def test_of_several_models_the_one_that_moved_is_named():
    reference = frozen.freeze(toys.weights())
    moved = reference.replace(
        stored=jax.tree.map(lambda leaf: leaf + 1, reference.stored)
    )
    frozen.verify_all({"code": reference, "chat": reference})
    with pytest.raises(frozen.ReferenceMovedError, match=r"^chat: expected the param"):
        frozen.verify_all({"code": reference, "chat": moved})


def test_verify_sees_swapped_and_missing_leaves():
    reference = frozen.freeze(small())
    layers = reference.stored["layers"]
    swapped = {**reference.stored, "layers": {"a": layers["b"], "b": layers["a"]}}
    with pytest.raises(ReferenceMovedError, match="got others in layers/a, layers/b"):
        frozen.verify(reference.replace(stored=swapped))
    fewer = {name: leaf for name, leaf in reference.stored.items() if name != "half"}
    with pytest.raises(ReferenceMovedError, match=r"expected the 6 leaves .* got 5"):
        frozen.verify(reference.replace(stored=fewer))


def test_a_cast_has_a_digest_of_its_own_and_keeps_the_source_s():
    params = {"w": jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)}
    reference = frozen.freeze(params, dtype="bfloat16")
    np.testing.assert_array_equal(reference.source_digests, digests(params))
    assert (reference.stored_digests != reference.source_digests).any()
    same = frozen.freeze(params)
    np.testing.assert_array_equal(same.stored_digests, same.source_digests)


def test_a_fingerprint_is_the_same_under_any_sharding():
    leaf = jnp.asarray(RNG.normal(size=(8, 16, 8)), jnp.float32)
    expected = fingerprint.fingerprint({"w": leaf})
    one, two = mesh_of(8), mesh_of(2, 4)
    for mesh, spec in [
        (one, PartitionSpec()),
        (one, PartitionSpec("x")),
        (one, PartitionSpec(None, "x")),
        (one, PartitionSpec(None, None, "x")),
        (two, PartitionSpec("x", "y")),
        (two, PartitionSpec(("y", "x"))),
    ]:
        sharded = jax.device_put(leaf, NamedSharding(mesh, spec))
        assert fingerprint.fingerprint({"w": sharded}) == expected
    words = np.asarray(digests({"w": sharded}))
    assert fingerprint.named({"w": leaf}, words) == expected


def test_a_digest_gathers_nothing():
    rows = NamedSharding(mesh_of(8), PartitionSpec("x"))
    shape = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    program = digests.lower({"w": shape}).compile().as_text()
    # Of what travels between the devices, a number of each at most.
    moved = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-[a-z]+\(", str(program))
    assert moved
    for sizes in moved:
        assert math.prod(int(size) for size in sizes.split(",") if size) <= 8


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2, 4)])
def test_a_digest_is_the_oracle_s(dtype, shape):
    """Snapshots contain fingerprints: another hash would break resuming old runs."""
    leaf = np.asarray(jnp.asarray(RNG.integers(-99, 99, shape), dtype))
    words = oracles.digest(leaf, "layers/w")
    np.testing.assert_array_equal(digests({"layers": {"w": leaf}})[0], words)
    fingerprints = fingerprint.fingerprint({"layers": {"w": leaf}})
    assert fingerprints.leaves == {"layers/w": f"{words[0]:08x}{words[1]:08x}"}


def test_another_reference_of_one_shape_does_not_retrace():
    traces = []

    @jax.jit
    def first(reference):
        traces.append(1)
        return jax.tree.leaves(frozen.read(reference))[0]

    first(frozen.freeze(small()))
    first(frozen.freeze(jax.tree.map(lambda leaf: leaf + leaf, small())))
    assert len(traces) == 1


@pytest.mark.parametrize("weight", [0.0, 0.5, 3])
def test_a_weight_of_0_or_more_is_taken(weight):
    frozen.check_further("code-7b.v2", weight=weight)


@pytest.mark.parametrize("weight", [-0.5, -1e-9, float("nan"), float("inf")])
def test_a_negative_weight_is_refused_with_its_name(weight):
    with pytest.raises(
        InputError, match="of reference code: expected a number of at least 0, got"
    ):
        frozen.check_further("code", weight=weight)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "k3", "coef", "exact"])
def test_a_name_that_no_metric_could_have_is_refused(name):
    with pytest.raises(InputError, match="expected a name of letters"):
        frozen.check_further(name, weight=1.0)
