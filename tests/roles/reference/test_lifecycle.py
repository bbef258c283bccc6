"""A reference moves as its lifecycle says, and keeps its storage."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import one_in

from rlhf_jax import drift, fingerprint, frozen
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import leaves
from rlhf_jax.roles.reference import lifecycle, storage
from rlhf_jax.roles.reference.lifecycle import Lifecycle, Mix, Reset

POLICY = toys.weights(seed=1)
START = toys.weights()


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


STORED = {
    "float32": dict,
    "bfloat16": lambda: {"dtype": "bfloat16"},
    "int8": lambda: {"dtype": "int8"},
    "int8 with bf16 tables": lambda: {"dtype": "int8", "embeddings": "bfloat16"},
    "host": lambda: {"memory": "pinned_host"},
    "int8 on the host": lambda: {"dtype": "int8", "memory": "pinned_host"},
    "eight devices": lambda: {"sharding": NamedSharding(mesh(), PartitionSpec())},
    "another device": lambda: {
        "sharding": jax.sharding.SingleDeviceSharding(jax.devices()[3])
    },
}
for_each_storage = pytest.mark.parametrize("how", STORED.values(), ids=STORED.keys())


def places(tree):
    """The sharding and dtype of every array of a tree."""
    return [(x.sharding, x.dtype, x.committed) for x in jax.tree.leaves(tree)]


def same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    chex.assert_trees_all_equal(left, right)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            how,
            id=name,
            marks=[pytest.mark.slow]
            * (name not in ("int8 on the host", "eight devices")),
        )
        for name, how in STORED.items()
    ],
)
def test_a_reset_is_a_freeze_of_the_policy_in_the_same_storage(how):
    reference = frozen.freeze(START, **how())
    moved = lifecycle.reset(reference, POLICY)
    same_bits(moved, frozen.freeze(POLICY, **how()))
    assert places(moved.stored) == places(reference.stored)
    frozen.verify(moved)
    same_bits(reference, frozen.freeze(START, **how()))  # a value: the old one stands


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("how", one_in(2, STORED.values()), ids=STORED.keys())
def test_a_mixture_by_hand_in_every_storage(how):
    reference = frozen.freeze(START, **how())
    moved = lifecycle.mix(reference, POLICY, rate=0.25)
    anchors = jax.tree.leaves(leaves.read(reference.stored))
    expected = [
        0.25 * np.asarray(leaf, np.float64) + 0.75 * np.asarray(anchor, np.float64)
        for leaf, anchor in zip(jax.tree.leaves(POLICY), anchors, strict=True)
    ]
    mixed = jax.tree.leaves(leaves.read(moved.stored))
    options = how()
    coarse = 2**-8 if "bfloat16" in options.values() else 1e-6
    for value, array in zip(expected, mixed, strict=True):
        step = np.abs(value).max() / 127 if options.get("dtype") == "int8" else 1e-7
        np.testing.assert_allclose(
            np.asarray(array, np.float64), value, rtol=coarse, atol=0.51 * step
        )
    assert places(moved.stored) == places(reference.stored)
    frozen.verify(moved)
    frozen.verify(reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, id=name, marks=[pytest.mark.slow] * (name != "int8"))
        for name, how in STORED.items()
        if name != "another device"  # `jit` takes arrays of one device
    ],
)
def test_they_trace_as_one_line_of_a_program(how):
    """A moving average of the policy, with a traced rate, keeps its storage."""
    reference = frozen.freeze(START, **how())
    mixed, reset = jax.jit(
        lambda reference, policy, rate: (
            lifecycle.mix(reference, policy, rate=rate),
            lifecycle.reset(reference, policy),
        )
    )(reference, POLICY, jnp.float32(0.25))
    expected = (
        lifecycle.mix(reference, POLICY, rate=0.25),
        frozen.freeze(POLICY, **how()),
    )
    for moved, eager in zip((mixed, reset), expected, strict=True):
        frozen.verify(moved)
        for ours, theirs in zip(
            jax.tree.leaves(moved.stored), jax.tree.leaves(eager.stored), strict=True
        ):
            assert ours.dtype == theirs.dtype
            assert ours.sharding.memory_kind == theirs.sharding.memory_kind
            scale = np.float32(np.abs(theirs).max())
            np.testing.assert_allclose(
                np.float32(ours),
                np.float32(theirs),
                atol=1e-6 * scale + (ours.dtype == jnp.int8),
            )


@pytest.mark.slow
def test_the_source_digests_of_a_mixture_are_of_what_was_stored():
    """float32 loses nothing, so source and stored digests agree; else they differ."""
    moved = lifecycle.mix(frozen.freeze(START), POLICY, rate=0.25)
    np.testing.assert_array_equal(moved.source_digests, moved.stored_digests)
    small = lifecycle.mix(frozen.freeze(START, dtype="bfloat16"), POLICY, rate=0.25)
    assert (small.source_digests != small.stored_digests).any(axis=1).all()
    names = frozen.source_fingerprint_of(
        lifecycle.reset(frozen.freeze(START, dtype="int8"), POLICY)
    )
    assert names == fingerprint.fingerprint(POLICY)


def test_a_rate_of_one_is_a_reset_and_of_zero_nothing():
    reference = frozen.freeze(START)
    same_bits(
        lifecycle.mix(reference, POLICY, rate=1.0), lifecycle.reset(reference, POLICY)
    )
    same_bits(lifecycle.mix(reference, POLICY, rate=0.0), reference)


@pytest.mark.slow
def test_mixtures_close_in_on_the_policy_geometrically():
    reference = frozen.freeze(START)
    first = float(drift.weight_drift(POLICY, reference.stored)["absolute"])
    for _ in range(3):
        reference = lifecycle.mix(reference, POLICY, rate=0.5)
    last = float(drift.weight_drift(POLICY, reference.stored)["absolute"])
    assert last == pytest.approx(first / 8, rel=1e-4)


def test_a_small_rate_rounds_away_in_few_bits():
    """The docstring warns of this; in float32 the rate is not lost."""
    ones = {"w": jnp.ones(4)}
    more = {"w": jnp.full(4, 2.0)}
    for dtype, moves in {"float32": True, "bfloat16": False}.items():
        reference = frozen.freeze(ones, dtype=dtype)
        moved = lifecycle.mix(reference, more, rate=1e-3)
        assert bool((moved.stored["w"] != reference.stored["w"]).all()) is moves


@pytest.mark.parametrize("move", [lifecycle.reset, lifecycle.mix])
def test_a_moved_reference_outlives_the_donation_of_the_policy(move):
    rate = {"rate": 1.0} if move is lifecycle.mix else {}
    policy = jax.tree.map(jnp.copy, POLICY)
    moved = move(frozen.freeze(START), policy, **rate)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)(policy)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(policy))
    frozen.verify(moved)
    same_bits(moved.stored, POLICY)


def test_a_moved_reference_does_not_retrace():
    traces = []

    @jax.jit
    def first(reference):
        traces.append(1)
        return jax.tree.leaves(frozen.read(reference))[0]

    reference = frozen.freeze(START, dtype="int8")
    for _ in range(2):
        first(reference)
        reference = lifecycle.reset(reference, POLICY)
        first(reference)
        reference = lifecycle.mix(reference, START, rate=0.1)
    assert len(traces) == 1
    assert first._cache_size() == 1  # nor does it compile again for another placement


def test_which_steps_move_and_which_take_the_kl():
    """Steps count from 0: a move ends a step, a KL starts one."""
    reference = frozen.freeze({"w": jnp.zeros(2)})

    def moves(plan):
        return [
            step
            for step in range(9)
            if lifecycle.after_step(
                reference, {"w": jnp.ones(2)}, step=step, lifecycle=plan
            )
            is not reference
        ]

    assert moves(Lifecycle()) == []
    assert moves(Lifecycle(kl_every=2)) == []
    assert moves(Lifecycle(Reset(3))) == [2, 5, 8]
    assert moves(Lifecycle(Mix(4, 0.5))) == [3, 7]
    plan = Lifecycle(Mix(1, 0.5))
    mixed = lifecycle.after_step(reference, {"w": jnp.ones(2)}, step=0, lifecycle=plan)
    np.testing.assert_array_equal(mixed.stored["w"], [0.5, 0.5])
    taken = [step for step in range(7) if Lifecycle(kl_every=3).takes_kl(step)]
    assert taken == [0, 3, 6]
    assert all(map(Lifecycle().takes_kl, range(5)))


def test_what_the_defaults_say_of_themselves():
    assert not Lifecycle(kl_every=5).moves
    assert Lifecycle(Reset(1)).moves
    assert not Lifecycle(Reset(1)).mixes
    assert Lifecycle(Mix(1, 0.0)).moves
    assert Lifecycle(Mix(1, 0.0)).mixes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reset(0), "every: expected a whole number, 1 or more, got 0; choose"),
        (lambda: Reset(-3), "every: expected a whole number, 1 or more, got -3"),
        (lambda: Mix(0, 0.5), "every: expected a whole number, 1 or more, got 0"),
        (lambda: Mix(5, 1.1), "rate: expected a number from 0 to 1, got 1.1"),
        (lambda: Mix(5, -0.1), "rate: expected a number from 0 to 1, got -0.1"),
        (lambda: Lifecycle(kl_every=0), "kl_every: expected a whole number, 1 or more"),
    ],
)
def test_lifecycles_that_cannot_be(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_rate_outside_is_refused_by_the_function_too():
    with pytest.raises(InputError, match="rate: expected a number from 0 to 1, got 2"):
        lifecycle.mix(frozen.freeze(START), POLICY, rate=2)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_another_model_is_refused(dtype):
    reference = frozen.freeze(START, dtype=dtype)
    wider = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=-1), POLICY)
    fewer = {name: leaf for name, leaf in POLICY.items() if name != "embed"}
    for move in (lifecycle.reset, functools.partial(lifecycle.mix, rate=0.5)):
        with pytest.raises(InputError, match="of the reference's structure"):
            move(reference, fewer)
        with pytest.raises(
            InputError, match=r"embed/positions: expected .* \(16, 8\), got \(16, 16\)"
        ):
            move(reference, wider)


SHAPES = [[1, 4, 5], [2, 1, 5], [2, 4, 1], [2, 1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("shape", one_in(4, SHAPES))
def test_matrices_of_one_row_or_column_keep_their_int8_axis(shape):
    """The axis is inferred from the scales, where axes of size 1 are ambiguous."""
    rng = np.random.default_rng(0)
    old, new = (
        {
            "layers": {"kernel": jnp.asarray(rng.normal(size=shape), jnp.float32)},
            "embed": {"tokens": jnp.asarray(rng.normal(size=shape[1:]), jnp.float32)},
        }
        for _ in range(2)
    )
    moved = lifecycle.reset(frozen.freeze(old, dtype="int8"), new)
    same_bits(moved.stored, storage.store(new, dtype="int8"))


@pytest.mark.parametrize(
    "move", [Mix(every=2, rate=0.1), pytest.param(Reset(3), marks=pytest.mark.slow)]
)
def test_a_reference_moves_within_a_program_as_between_programs(move):
    """Compares a scan of six steps with a moving policy against a Python loop."""
    moves = Lifecycle(move=move)
    start = frozen.freeze(START)

    def policy_of(step):
        return jax.tree.map(lambda x, y: x + step * y, START, POLICY)

    def body(reference, step):
        now = policy_of(step.astype(jnp.float32))
        moved = lifecycle.within_program(reference, now, step=step, lifecycle=moves)
        return moved, moved.source_digests

    output, digests = jax.jit(
        lambda reference: jax.lax.scan(body, reference, jnp.arange(6))
    )(start)
    reference = start
    for step in range(6):
        now = policy_of(np.float32(step))
        reference = lifecycle.after_step(reference, now, step=step, lifecycle=moves)
    chex.assert_trees_all_close(output.stored, reference.stored, rtol=1e-6)
    frozen.verify(output)
    # It stood still where nothing was due.
    still = np.all(np.asarray(digests[1:]) == np.asarray(digests[:-1]), axis=(1, 2))
    np.testing.assert_array_equal(
        still, [(s + 1) % move.every != 0 for s in range(1, 6)]
    )


def test_a_frozen_reference_stays_within_a_program():
    start = frozen.freeze(START)
    step = jnp.int32(1)
    moved = lifecycle.within_program(start, POLICY, step=step, lifecycle=Lifecycle())
    assert moved is start
