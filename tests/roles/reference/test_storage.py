"""Every storage of a frozen model: its memory, and equal log-probs."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import toys
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from tiers import one_in

from rlhf_jax import config, decoder, fingerprint, frozen, policy, ppo, rewards
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.ppo import gae_experience
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.models import leaves
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.runs import report

CPUS = jax.devices()
TOKENS, MASK = tiny.batch([5, 8], 8, side="left")
MIB = 2**20
KEY = jax.random.key(0)
# Of few shapes, as each is stored by programs of its own.
SQUARE = dataclasses.replace(tiny.GPT2, intermediate_size=16, max_positions=128)
logprobs = toys.jit(policy.logprobs, static_argnames=("model",))


def mesh_on(*devices):
    return jax.make_mesh((len(devices),), ("model",), (AxisType.Auto,), devices=devices)


def logprobs_of(reference, *, model):
    tokens, mask = frozen.beside(reference, (TOKENS, MASK))
    return np.asarray(
        logprobs(frozen.read(reference), model=model, tokens=tokens, mask=mask)
    )


# --- oracles ------------------------------------------------------------------


def rounded_to_int8(x, axis):
    """(integers, scales), computed in float64 channel by channel."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    integers, scales = np.zeros(x.shape), np.zeros(x.shape[:-1])
    for channel in np.ndindex(*x.shape[:-1]):
        scales[channel] = max(abs(value) for value in x[channel]) / 127
        if scales[channel]:
            integers[channel] = np.round(x[channel] / scales[channel])
    return np.moveaxis(integers, -1, axis), np.expand_dims(scales, axis)


def as_stored(params, *, dtype=None, embeddings=None, memory=None):
    """The parameters that a storage represents, plain and in float32."""

    def of(path, leaf):
        names = [entry.key for entry in path]
        table = "embed" in names or "head" in names
        if dtype is None:
            return leaf
        if dtype != "int8" or (table and embeddings is not None):
            rounded = np.asarray(leaf).astype(embeddings or dtype)
            return jnp.asarray(rounded.astype(np.float32))
        if table or (leaf.ndim == 3 and "layers" in names):
            integers, scales = rounded_to_int8(leaf, -1 if table else 1)
            return jnp.asarray(integers * scales, jnp.float32)
        return leaf

    return jax.tree.map_with_path(of, params)


# --- what a way says ----------------------------------------------------------


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    "model", [SQUARE, pytest.param(tiny.LLAMA, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "way", one_in(6, storage.WAYS.values()), ids=storage.WAYS.keys()
)
def test_every_way_computes_what_it_stands_for(way, model):
    params = tiny.params(model)
    reference = toys.freeze(params, **way) if not way else frozen.freeze(params, **way)
    expected = logprobs(as_stored(params, **way), model=model, tokens=TOKENS, mask=MASK)
    np.testing.assert_allclose(logprobs_of(reference, model=model), expected, atol=3e-5)
    frozen.verify(reference)
    np.testing.assert_array_equal(reference.source_digests, fingerprint.digests(params))


@pytest.mark.slow
def test_a_reward_model_is_one_line_away():
    model = SQUARE
    rng = np.random.default_rng(1)
    score_head = {
        "kernel": jnp.asarray(rng.normal(size=model.hidden_size), jnp.float32),
        "bias": jnp.float32(0.25),
    }
    params = {"trunk": tiny.params(model), "score": score_head}
    frozen_ = frozen.freeze(params, dtype="int8", memory="pinned_host")
    reward = rewards.from_model(frozen_, model=model)
    responses = types.SimpleNamespace(tokens=TOKENS, mask=MASK)
    scores = toys.jit(
        lambda reward, tokens, mask: reward(
            types.SimpleNamespace(tokens=tokens, mask=mask)
        )
    )(reward, responses.tokens, responses.mask)
    plain = {"trunk": as_stored(params["trunk"], dtype="int8"), "score": score_head}
    expected = rewards.sequence_scores(
        plain, model=model, tokens=jnp.asarray(TOKENS), mask=jnp.asarray(MASK)
    )
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    assert np.abs(np.asarray(expected)).min() > 0.01


def test_int8_is_within_half_a_step_of_the_oracle():
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(2, 6, 5)) * 10.0 ** rng.integers(-4, 4, (2, 1, 5))
    kernel[1, :, 2] = 0.0  # a dead output: scale 0, and no NaN
    kernel[0, 3, 1] = -np.abs(kernel[0, :, 1]).max() * 2  # the largest is negative
    for axis in (-2, -1):
        quantised = storage.quantise(jnp.asarray(kernel, jnp.float32), axis=axis)
        integers, scales = rounded_to_int8(np.float32(kernel), axis)
        np.testing.assert_array_equal(quantised.values, integers)
        np.testing.assert_allclose(quantised.scales, scales, rtol=1e-6)
        assert quantised.values.dtype == jnp.int8
        assert np.abs(quantised.values).max() == 127
        error = np.abs(np.asarray(quantised.read(), np.float64) - np.float32(kernel))
        assert (error <= scales / 2 * (1 + 1e-5)).all()
    dead = storage.quantise(jnp.zeros((1, 3, 2)), axis=-2)
    np.testing.assert_array_equal(dead.read(), 0.0)


@pytest.mark.slow
def test_rows_of_an_int8_table_are_those_of_the_whole():
    table = storage.quantise(
        jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), jnp.float32), axis=-1
    )
    index = jnp.array([[3, 0], [6, 6]])
    np.testing.assert_array_equal(leaves.rows(table, index), table.read()[index])
    host = leaves.OnHost(jax.device_put(table, jax.memory.Space.Host))
    np.testing.assert_array_equal(leaves.rows(host, index), table.read()[index])


# --- from any way to any way --------------------------------------------------


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.slow
def test_what_is_stored_is_copied_as_it_is():
    """Freezing again without an option keeps the integers and their memory."""
    for way in storage.WAYS.values():
        first = frozen.freeze(tiny.params(SQUARE), **way)
        again = frozen.freeze(first.stored)
        np.testing.assert_array_equal(again.stored_digests, first.stored_digests)
        assert jax.tree.structure(again.stored) == jax.tree.structure(first.stored)
        assert kinds(again.stored) == kinds(first.stored)
        jax.tree.map(lambda leaf: leaf.delete(), first.stored)
        frozen.verify(again)


@pytest.mark.slow
def test_what_is_stored_is_stored_another_way():
    params = tiny.params(SQUARE)
    eight = storage.store(params, dtype="int8", memory="pinned_host")
    back = storage.store(eight, dtype="float32", memory="device")
    expected = as_stored(params, dtype="int8")
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6), back, expected
    )
    assert kinds(back) == {"device"}
    near = storage.store(eight, memory="device")
    assert kinds(near) == {"device"}
    assert toys.leaves_equal(near, storage.store(params, dtype="int8"))
    half = storage.store(eight, dtype="int8", embeddings="float16")
    assert half["embed"]["tokens"].held.dtype == jnp.float16
    up = half["layers"]["mlp"]["up"]["kernel"]
    assert toys.leaves_equal(up, eight["layers"]["mlp"]["up"]["kernel"])
    assert kinds(half) == {"pinned_host"}


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, ["host-int8", "copy", "int8"]))
def test_freezing_inside_jit_is_freezing(name):
    params = tiny.params(SQUARE)
    way = storage.WAYS[name]
    inside = toys.jit(functools.partial(frozen.freeze, **way))(params)
    outside = frozen.freeze(params, **way)
    np.testing.assert_array_equal(inside.stored_digests, outside.stored_digests)
    np.testing.assert_array_equal(inside.source_digests, outside.source_digests)
    assert kinds(inside.stored) == kinds(outside.stored)


# --- devices ------------------------------------------------------------------


def tensor_parallel(params, mesh):
    """Megatron's rules: columns of layers that read the stream, rows of writers."""

    def rule(path, leaf):
        names = [entry.key for entry in path]
        if names[-1] != "kernel" or leaf.ndim != 3:
            return NamedSharding(mesh, PartitionSpec())
        rows = names[-2] in ("output", "down")
        spec = (None, "model", None) if rows else (None, None, "model")
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map_with_path(rule, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copy", "int8", "host-int8"])
def test_a_reference_on_devices_of_its_own_says_the_same(name):
    """The policy is on device 0; the reference on 5, or split over 4 and 6."""
    model = SQUARE
    params = jax.device_put(tiny.params(model), CPUS[0])
    way = storage.WAYS[name]
    here = frozen.freeze(params, **way)
    expected = logprobs_of(here, model=model)
    alone = frozen.freeze(params, **way, sharding=SingleDeviceSharding(CPUS[5]))
    np.testing.assert_array_equal(logprobs_of(alone, model=model), expected)
    split = frozen.freeze(
        params, **way, sharding=tensor_parallel(params, mesh_on(CPUS[4], CPUS[6]))
    )
    up = jax.tree.leaves(split.stored["layers"]["mlp"]["up"]["kernel"])[0]
    assert up.sharding.device_set == {CPUS[4], CPUS[6]}
    assert up.addressable_shards[0].data.shape == (2, 16, 8)
    np.testing.assert_allclose(logprobs_of(split, model=model), expected, atol=1e-5)
    for other in (alone, split):
        frozen.verify(other)
        assert frozen.fingerprint_of(other) == frozen.fingerprint_of(here)


@pytest.mark.slow
def test_log_probs_computed_beside_give_the_score_to_the_bit():
    """The rollout goes to the reference's devices, and its log-probs come back."""
    options = {"model": toys.GPT2, "max_new_tokens": toys.SIZE, "temperature": 0.7}
    params = jax.device_put(toys.params(), CPUS[0])
    rollout = toys.sampled(params)
    compute = toys.jit(functools.partial(score.reference_logprobs, **options))
    here = toys.freeze(toys.params(seed=2))
    moved = jax.device_put(here, CPUS[5])
    beside = compute(moved, rollout=frozen.beside(moved, rollout))
    assert beside.sharding.device_set == {CPUS[5]}
    back = jax.device_put(beside, rollout.old_logprobs.sharding)

    def scored(reference, ref_logprobs):
        return toys.jit(functools.partial(score.score, **options))(
            rollout,
            scores=jnp.zeros(4),
            reference=reference,
            ref_logprobs=ref_logprobs,
        )

    assert toys.leaves_equal(scored(None, back), scored(here, None))
    assert np.abs(scored(None, back).kl).max() > 0.01


@pytest.mark.slow
def test_other_rules_than_the_policy_s_say_the_same():
    """The policy split by rows over eight devices, its reference by columns over two
    of them and copied to the other four pairs."""
    model = SQUARE
    eight = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    pairs = jax.make_mesh((4, 2), ("copies", "model"), (AxisType.Auto,) * 2)
    params = tiny.params(model)
    expected = logprobs_of(frozen.freeze(params), model=model)

    def by_rows(leaf):
        spec = PartitionSpec(None, "data") if leaf.ndim == 3 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(eight, spec))

    spread = jax.tree.map(by_rows, params)
    reference = frozen.freeze(spread, sharding=tensor_parallel(params, pairs))
    np.testing.assert_allclose(logprobs_of(reference, model=model), expected, atol=1e-5)
    assert frozen.fingerprint_of(reference) == fingerprint.fingerprint(params)


# --- what a way takes ---------------------------------------------------------

SMALL = config.gpt2(
    vocab_size=50257, hidden_size=768, num_layers=12, num_heads=12, max_positions=1024
)


def zeros(model):
    shapes = jax.eval_shape(lambda key: decoder.init(key, model=model), KEY)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), shapes
    )


def held_mib(params, **way):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(storage.store(params, **way)))


@pytest.mark.long
@pytest.mark.slow
def test_gpt2_small_measured_from_the_arrays():
    """The 47 rows that pad the vocabulary to 50304 take 0.14 MiB more in float32."""
    padded = zeros(SMALL)
    whole = held_mib(padded)
    assert whole / MIB == pytest.approx(474.70 + 47 * 768 * 4 / MIB, abs=0.005)
    true = {**padded, "embed": {**padded["embed"]}}
    true["embed"]["tokens"] = padded["embed"]["tokens"][: SMALL.vocab_size]
    assert held_mib(true) / MIB == pytest.approx(474.70, abs=0.005)
    for dtype in ("bfloat16", "float16"):
        assert held_mib(true, dtype=dtype) / MIB == pytest.approx(237.35, abs=0.005)
        assert held_mib(padded, dtype=dtype) <= 0.51 * whole
    assert held_mib(padded, dtype="int8") <= 0.28 * whole
    assert held_mib(padded, dtype="int8", embeddings="bfloat16") <= 0.36 * whole


DEEP = config.gpt2(
    vocab_size=13, hidden_size=64, num_layers=16, num_heads=2, max_positions=8
)


# Not bfloat16, which XLA:CPU widens before the loop; the TPU's compiler does not.
@pytest.mark.cases(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("int8", "fp16", "host")
        ),
        "host-int8",
    ],
)
def test_layers_are_read_one_at_a_time(name):
    """No program has the stacked layers in float32, which would dominate its memory."""
    params = zeros(DEEP)
    reference = jax.jit(functools.partial(frozen.freeze, **storage.WAYS[name]))(params)
    program = jax.jit(
        lambda reference: policy.logprobs(
            frozen.read(reference), model=DEEP, tokens=TOKENS, mask=MASK
        )
    )
    memory = program.lower(reference).compile().memory_analysis()
    assert memory.temp_size_in_bytes < storage.nbytes(params["layers"]) / 4


def test_shapes_are_stored_without_an_array():
    for way in storage.WAYS.values():
        model = SQUARE
        of_shapes = jax.eval_shape(
            functools.partial(storage.store, **way), tiny.params(model)
        )
        stored = storage.store(tiny.params(model), **way)
        assert storage.nbytes(of_shapes) == storage.nbytes(stored)


def test_a_table_counts_parameters_not_scales(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    params = tiny.params(SQUARE)
    reference = frozen.freeze(params, dtype="int8", memory="pinned_host")
    report.model_table(
        [
            report.Role("policy", params, trained=True),
            report.Role("reference", reference.stored),
        ]
    )
    text = capsys.readouterr().out
    count = f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,}"
    assert text.splitlines()[-1] == f"{count} trainable, {count} frozen"
    row = next(line for line in text.splitlines() if "reference" in line)
    assert "float32, int8" in row
    assert "cpu 0, pinned_host" in row


# --- no gradient --------------------------------------------------------------


@pytest.mark.cases(slow=1)
@pytest.mark.slow  # quick: test_no_gradient_reaches_it_through_an_iteration
@pytest.mark.parametrize("name", ["copy", "bf16"])
def test_no_loss_moves_the_reference(name):
    """Checks KL, rewards, advantages and PPO's loss."""
    model = toys.GPT2
    frozen_reference = frozen.freeze(toys.params(seed=2), **storage.WAYS[name])
    rollout = toys.sampled(toys.params())
    optimizer = optax.sgd(0.1)
    options = ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=optimizer,
        critic_optimizer=optimizer,
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        penalty=Penalty(value_estimator="exact", placement="both"),
    )
    critic = {
        "trunk": toys.params(seed=3),
        "score": {"kernel": jnp.full(model.hidden_size, 0.1), "bias": jnp.float32(0)},
    }

    def losses(policy_params, stored):
        reference = dataclasses.replace(frozen_reference, stored=stored)
        scored = score.score(
            rollout,
            scores=jnp.arange(4.0),
            reference=reference,
            model=model,
            values=score.response_values(
                critic,
                rollout=rollout,
                model=model,
                max_new_tokens=toys.SIZE,
                after_stop=False,
            ),
            max_new_tokens=toys.SIZE,
            temperature=0.7,
            penalty=options.penalty,
            policy=policy_params,
        )
        learned = gae_experience(scored, kl_coef=jnp.float32(0.3), gamma=1.0, lam=0.95)
        num_tokens = rollout.response_mask.sum(dtype=jnp.float32)
        loss, _ = ppo.ppo_loss(
            *(policy_params, critic),
            experience=learned,
            kl_coef=0.3,
            num_tokens=num_tokens,
            num_values=num_tokens,
            num_responses=jnp.float32(4),
            recipe=options,
            frozen=FrozenModels(reference=reference),
        )
        read = (loss, learned.token_rewards, learned.advantages, scored.kl)
        return jnp.stack([array.sum() for array in read])

    of_policy, of_reference = toys.jit(jax.jacrev(losses, (0, 1)))(
        toys.params(seed=4), frozen_reference.stored
    )
    for leaf in jax.tree.leaves(of_reference):
        assert leaf.shape[0] == 4
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), 0.0)
    assert all(np.asarray(leaf[0]).any() for leaf in jax.tree.leaves(of_policy))


# --- what a user may get wrong ------------------------------------------------


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            {"dtype": "int4"},
            "dtype: expected one of None, 'float32', 'bfloat16', 'flo",
        ),
        ({"dtype": "eight"}, "'bfloat16', 'float16', 'int8', got 'eight'"),
        ({"dtype": "int32"}, "'float16', 'int8', got 'int32'"),
        ({"memory": "disk"}, "memory: expected one of None, 'device', .* got 'disk'"),
        ({"embeddings": "bfloat16"}, "only int8 takes"),
        ({"dtype": "bfloat16", "embeddings": "float32"}, "where dtype is bfloat16"),
        ({"dtype": "int8", "embeddings": "int4"}, "embeddings: expected one of None"),
    ],
)
def test_storages_that_do_not_exist(way, message):
    with pytest.raises(InputError, match=message):
        frozen.freeze(tiny.params(SQUARE), **way)


def test_int8_needs_matrices():
    with pytest.raises(InputError, match="int8 is for matrices under embed, head or"):
        frozen.freeze({"w": jnp.ones((4, 4))}, dtype="int8")


def test_shardings_that_do_not_fit():
    params = tiny.params(SQUARE)
    eight = jax.make_mesh((8,), ("model",), (AxisType.Auto,))
    layers = NamedSharding(eight, PartitionSpec("model"))
    with pytest.raises(InputError, match=r"layers/attention/key/bias \(2, 16\)"):
        frozen.freeze({"layers": params["layers"]}, sharding=layers)
    with pytest.raises(InputError, match="a tree of them that is a prefix of the para"):
        frozen.freeze(params, sharding={"embed": layers})
    pinned = SingleDeviceSharding(CPUS[0], memory_kind="pinned_host")
    with pytest.raises(InputError, match="say memory='pinned_host'"):
        frozen.freeze(params, sharding=pinned)


def test_a_memory_that_a_device_lacks_is_told_with_what_it_has():
    memories = [types.SimpleNamespace(kind="device"), types.SimpleNamespace(kind="far")]
    device = types.SimpleNamespace(
        device_kind="toy", addressable_memories=lambda: memories
    )
    message = r"one that toy has \(device, far\), got pinned_host; leave memory out"
    with pytest.raises(InputError, match=message):
        storage.check_memory(device)
    storage.check_memory(CPUS[0])
