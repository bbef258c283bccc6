"""Every way in which a reference might be moved fails or is detected."""

import ctypes
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import one_in

from rlhf_jax import frozen, kl_control, masked, ppo, state
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.models import leaves
from rlhf_jax.roles.reference import lifecycle
from rlhf_jax.roles.reference.frozen import FrozenModels, ReferenceMovedError

MODEL = toys.GPT2
assert MODEL.tied_head  # one table is read at both ends


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


STORED = {
    "copy": dict,
    "bfloat16": lambda: {"dtype": "bfloat16"},
    "float16": lambda: {"dtype": "float16"},
    "int8": lambda: {"dtype": "int8"},
    "int8 with bf16 tables": lambda: {"dtype": "int8", "embeddings": "bfloat16"},
    "host": lambda: {"memory": "pinned_host"},
    "int8 on the host": lambda: {"dtype": "int8", "memory": "pinned_host"},
    "eight devices": lambda: {"sharding": NamedSharding(mesh(), PartitionSpec())},
    "its own place again": lambda: {
        "sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0])
    },
}
for_each_storage = pytest.mark.parametrize("how", STORED.values(), ids=STORED.keys())


def on_host(tree):
    return jax.tree.map(np.array, tree)


def assert_stands(reference, before):
    chex.assert_trees_all_equal(on_host(reference.stored), before)
    frozen.verify(reference)


# The buffers.


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("how", one_in(4, STORED.values()), ids=STORED.keys())
def test_nothing_of_the_policy_is_shared(how):
    """An alias of any leaf, the tied embedding included, would change or be donated."""
    policy = jax.tree.map(jnp.copy, toys.weights())
    reference = frozen.freeze(policy, **how())
    before = on_host(reference.stored)
    buffers = [
        {
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
        }
        for tree in (policy, reference.stored)
    ]
    assert not buffers[0] & buffers[1]
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)
    overwrite(policy)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(policy))
    assert_stands(reference, before)


@pytest.mark.cases(quick=3)
@for_each_storage
def test_writes_into_the_source_s_numpy_buffer_do_not_reach_it(how):
    """The buffer is aligned for XLA, which could then take it without a copy."""
    buffer = np.zeros(4 * 64 * 32 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    matrix = buffer[start : start + 4 * 64 * 32].view(np.float32).reshape(2, 32, 32)
    matrix[:] = np.random.default_rng(0).normal(size=matrix.shape)
    reference = frozen.freeze({"layers": {"kernel": matrix}}, **how())
    before = on_host(reference.stored)
    matrix[:] = 7.0
    assert_stands(reference, before)


@pytest.mark.cases(quick=1)
@for_each_storage
def test_numpy_views_of_it_are_read_only(how):
    reference = frozen.freeze(toys.weights(), **how())
    for leaf in jax.tree.leaves(reference.stored):
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(leaf).reshape(-1)[0] = 0


@pytest.mark.cases(quick=4)
@for_each_storage
def test_a_write_past_all_guards_is_told(how):
    """Writes one byte into the buffer itself, as a C library could."""
    reference = frozen.freeze(toys.weights(), **how())
    leaf = jax.tree.leaves(reference.stored)[-1]
    jax.block_until_ready(reference)
    address = leaf.addressable_shards[0].data.unsafe_buffer_pointer()
    byte = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    byte[1] ^= 1
    with pytest.raises(ReferenceMovedError, match="got others in layers/mlp_norm/sca"):
        frozen.verify(reference)
    byte[1] ^= 1
    frozen.verify(reference)


# The optimizer.


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", ["copy", "bfloat16", "host"])
def test_an_optimizer_over_a_tree_that_contains_it_is_told(name):
    """Its gradient is zero, but weight decay would move it."""
    reference = frozen.freeze(toys.weights(), **STORED[name]())
    trained = {"policy": toys.weights(), "reference": leaves.read(reference.stored)}
    optimizer = optax.adamw(0.1, weight_decay=0.1)

    @jax.jit
    def step(tree):
        def loss(tree):
            read = frozen.read(reference.replace(stored=tree["reference"]))
            apart = jax.tree.map(
                lambda a, b: ((a - b) ** 2).sum(), tree["policy"], read
            )
            return sum(jax.tree.leaves(apart))

        grads = jax.grad(loss)(tree)
        updates, _ = optimizer.update(grads, optimizer.init(tree), tree)
        return grads["reference"], optax.apply_updates(tree, updates)["reference"]

    grads, moved = step(trained)
    assert not any(
        np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(grads)
    )
    with pytest.raises(ReferenceMovedError, match="got others in embed/positions, emb"):
        frozen.verify(frozen.freeze(reference.stored).replace(stored=moved))


BASE = ppo.PPO(
    model=MODEL,
    critic_model=MODEL,
    policy_optimizer=optax.adamw(0.1, weight_decay=0.1),
    critic_optimizer=optax.adamw(0.1, weight_decay=0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=1,
)


def begin(settings: ppo.PPO = BASE) -> state.TrainState:
    """The policy starts from the frozen parameters."""
    return state.ppo_state(
        policy=jax.tree.map(jnp.copy, toys.params()),
        critic=toys.scorer(seed=1),
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(0.1),
    )


def scores(rollout):
    even = (rollout.tokens % 2 == 0).astype(jnp.float32)
    return masked.masked_mean(even, mask=rollout.response_mask, axis=1)


@pytest.fixture(scope="module")
def rollout():
    return toys.sampled(toys.params())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["copy", pytest.param("int8 on the host", marks=pytest.mark.long)]
)
def test_ppo_with_weight_decay_and_donation_moves_the_policy_alone(rollout, name):
    current = begin()
    reference = frozen.freeze(current.policy, **STORED[name]())
    before, start = on_host(reference.stored), on_host(current.policy)
    learn = toys.jit(ppo.learn, static_argnames=("recipe",), donate_argnames=("state",))
    for number in range(2):
        last = current
        current, _, _ = learn(
            current,
            rollout=rollout,
            scores=scores(rollout),
            frozen=FrozenModels(reference=reference),
            key=jax.random.key(number),
            recipe=BASE,
        )
        reference_next = lifecycle.after_step(
            reference, current.policy, step=number, lifecycle=BASE.lifecycle
        )
        assert reference_next is reference  # nothing asked for a reset or a mixture
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(last.policy))
    assert_stands(reference, before)
    for new, old in zip(
        jax.tree.leaves(current.policy), jax.tree.leaves(start), strict=True
    ):
        assert (np.asarray(new) != old).any()


# The gradient.


def gradient_of_all(rollout, name: str) -> float:
    """The largest gradient of any output of `learn` by the reference's floats."""
    reference = frozen.freeze(toys.params(seed=5), **STORED[name]())
    settings = dataclasses.replace(
        BASE,
        policy_optimizer=optax.sgd(0.1),
        critic_optimizer=optax.sgd(0.1),
        penalty=Penalty(value_estimator="exact", placement="both"),
    )

    start = begin(settings)

    def everything(reference):
        learned = ppo.learn(
            start,
            rollout=rollout,
            scores=scores(rollout),
            frozen=FrozenModels(reference=reference),
            key=jax.random.key(0),
            recipe=settings,
        )
        floats = [
            leaf
            for leaf in jax.tree.leaves(learned)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        return sum(jnp.sin(leaf).sum() for leaf in floats)

    grads = toys.jit(jax.grad(everything, allow_int=True))(reference)
    floats = [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]
    assert floats
    return max(np.abs(np.asarray(g, np.float32)).max() for g in floats)


IN_TWO = ["copy", pytest.param("int8 with bf16 tables", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", IN_TWO)
def test_no_gradient_reaches_it_through_an_iteration(rollout, name):
    """Checks the next state, the metrics and the scored rollout."""
    assert gradient_of_all(rollout, name) == 0


@pytest.mark.cases(slow=1)
@pytest.mark.slow  # a test of the test above, which fails without that line
@pytest.mark.parametrize("name", ["copy", "int8 with bf16 tables"])
def test_but_for_one_line_it_would(rollout, monkeypatch, name):
    monkeypatch.setattr(frozen, "read", lambda reference: reference.stored)
    assert gradient_of_all(rollout, name) > 1e-3
