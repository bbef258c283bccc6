"""Programs on a mesh of eight devices give the numbers of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import (
    batch,
    config,
    critic,
    dpo,
    frozen,
    grpo,
    kl_control,
    ppo,
    rewards,
    sft,
    state,
)
from rlhf_jax.algorithms import reward_model
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.options import Centred
from rlhf_jax.data import packing
from rlhf_jax.data.examples import Pair
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
MODEL = config.llama(
    vocab_size=13,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    max_positions=24,
)
MESH = MeshShape(data=2, fsdp=2, tensor=2)
PARAMS, REFERENCE = toys.params(MODEL), toys.params(MODEL, seed=3)
OPTIMIZER = optax.adam(1e-3, eps=1e-5)
LENGTHS = (4, 2, 3, 1) * 4
KEY = jax.random.key(9)


def texts(seed):
    rng = np.random.default_rng(seed)
    mask = np.arange(6)[None, :] < rng.integers(2, 7, 8)[:, None]
    tokens = np.where(mask, rng.integers(3, 13, mask.shape), 0)
    return batch.Sequences(
        tokens=tokens.astype(np.int32), mask=mask, response_mask=mask
    )


def pairs():
    rng = np.random.default_rng(8)

    def words(count):
        return rng.integers(3, 13, count).tolist()

    return [Pair(words(2), [*words(i % 4), 1], [*words(3), 2]) for i in range(8)]


def supervised(place, params=PARAMS):
    return place(state.supervised_state(params, optimizer=OPTIMIZER))


def run_sft(place, rows):
    update = toys.jit(functools.partial(sft.update, model=MODEL, optimizer=OPTIMIZER))
    return update(supervised(place), batch=rows(texts(1)))


def run_reward_model(place, rows):
    head = rewards.init(jax.random.key(2), PARAMS, model=MODEL)
    update = functools.partial(reward_model.update, model=MODEL, optimizer=OPTIMIZER)
    chosen = batch.Preferences(chosen=texts(1), rejected=texts(2))
    return toys.jit(update)(supervised(place, head), batch=rows(chosen))


def run_dpo(place, rows):
    algorithm = dpo.DPO(model=MODEL, optimizer=OPTIMIZER, beta=0.4)
    [packed] = packing.packed_in_order(
        packing.pack(pairs(), width=None), batch_size=8, pad_id=0
    )
    return toys.jit(functools.partial(dpo.update, dpo=algorithm))(
        supervised(place),
        batch=rows(packed),
        reference=place(toys.freeze(REFERENCE)),
    )


def run_grpo(place, rows, **options):
    algorithm = grpo.GRPO(
        model=MODEL,
        policy_optimizer=OPTIMIZER,
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        group_size=4,
        **options,
    )
    single = toys.prompts(LENGTHS[:4])
    grouped = jax.tree.map(lambda leaf: jnp.repeat(leaf, 4, axis=0), single)
    grouped = grouped.replace(sample=jnp.tile(jnp.arange(4, dtype=jnp.int32), 4))
    scorer = toys.scorer(MODEL, seed=1)
    train = state.grpo_state(
        policy=PARAMS, policy_optimizer=OPTIMIZER, kl=kl_control.fixed(0.1)
    )
    after, stats, _ = toys.jit(functools.partial(grpo.iteration, recipe=algorithm))(
        place(train),
        prompts=rows(grouped),
        frozen=FrozenModels(reference=place(toys.freeze(REFERENCE))),
        reward=rewards.from_model(place(toys.freeze(scorer)), model=MODEL),
        key=KEY,
    )
    return after, stats


def run_score_centring(place, rows):
    """In the second epoch the likeliest tokens of sampler and policy differ."""
    surrogate = Centred(top_k=4)
    return run_grpo(place, rows, surrogate=surrogate, num_epochs=2)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    "program",
    [
        run_sft,
        run_reward_model,
        pytest.param(run_dpo, marks=pytest.mark.long),
        pytest.param(run_grpo, marks=pytest.mark.long),
        pytest.param(run_score_centring, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [MESH, MeshShape(fsdp=2, context=4), MeshShape(dcn=2, fsdp=2, tensor=2)],
    ids=str,
)
def test_a_program_on_a_mesh_is_that_of_one_device(program, shape):
    expected, expected_stats = program(lambda tree: tree, lambda rows: rows)
    with jax.set_mesh(shape.make()):
        output, stats = program(sharding.place, row_sharding.put_rows)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, output, expected)
    means, expected_means = toys.means(stats), toys.means(expected_stats)
    assert means.keys() == expected_means.keys()
    for name, value in expected_means.items():
        near(means[name], value, err_msg=name)


# --- a reference with rules, or devices, of its own -------------------------------

ALGORITHM = ppo.PPO(
    model=MODEL,
    critic_model=MODEL,
    policy_optimizer=OPTIMIZER,
    critic_optimizer=OPTIMIZER,
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=1,
)
SHAPE = {"model": MODEL, "max_new_tokens": toys.SIZE, "temperature": 0.7}
reference_logprobs = toys.jit(functools.partial(score.reference_logprobs, **SHAPE))
sample = toys.jit(functools.partial(ppo.sample, recipe=ALGORITHM))
learn = toys.jit(functools.partial(ppo.learn, recipe=ALGORITHM))


def fresh():
    return state.ppo_state(
        policy=PARAMS,
        critic=critic.from_policy(PARAMS, model=MODEL),
        policy_optimizer=OPTIMIZER,
        critic_optimizer=OPTIMIZER,
        kl=kl_control.fixed(0.1),
    )


def iterate(train, *, prompts, reference, reference_mesh=None):
    """One iteration, with a separate program for the reference."""
    answered = sample(train.policy, prompts=prompts, key=KEY)
    moved = frozen.beside(reference, answered)
    if reference_mesh is None:
        ref_logprobs = reference_logprobs(reference, rollout=moved)
    else:
        with jax.set_mesh(reference_mesh):
            ref_logprobs = reference_logprobs(reference, rollout=moved)
    ref_logprobs = jax.device_put(ref_logprobs, answered.old_logprobs.sharding)
    scores = answered.response_mask.sum(axis=1).astype(jnp.float32)
    after, stats, _ = learn(
        train,
        rollout=answered,
        scores=scores,
        frozen=NO_MODELS,
        ref_output=batch.ReferenceOutput(logprobs=ref_logprobs),
        key=KEY,
    )
    return after.policy, toys.means(stats)


@pytest.fixture(scope="module")
def plain():
    return iterate(
        fresh(),
        prompts=toys.prompts(LENGTHS),
        reference=toys.freeze(REFERENCE),
    )


def check_equal(output, plain):
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, jax.device_get(output), jax.device_get(plain))


@pytest.mark.long
def test_a_reference_by_rules_of_its_own(plain):
    """The reference shards only the vocabulary; the policy is fully sharded."""
    rules = {**sharding.RULES, "embed": None, "heads": None, "mlp": None}
    with jax.set_mesh(MESH.make()):
        reference = sharding.place(toys.freeze(REFERENCE), rules=rules)
        up = reference.stored["layers"]["mlp"]["up"]["kernel"]
        assert up.sharding.is_fully_replicated
        output = iterate(
            sharding.place(fresh()),
            prompts=row_sharding.put_rows(toys.prompts(LENGTHS)),
            reference=reference,
        )
    check_equal(output, plain)


@pytest.mark.long
def test_a_reference_on_devices_of_its_own(plain):
    ours, theirs = np.split(np.array(jax.devices()), 2)
    own = MeshShape(fsdp=4).make(list(theirs))
    reference = sharding.place(toys.freeze(REFERENCE), mesh=own)
    with jax.set_mesh(MeshShape(data=2, tensor=2).make(list(ours))):
        output = iterate(
            sharding.place(fresh()),
            prompts=row_sharding.put_rows(toys.prompts(LENGTHS)),
            reference=reference,
            reference_mesh=own,
        )
    devices = {d for leaf in jax.tree.leaves(reference) for d in leaf.devices()}
    assert devices == set(theirs)
    with jax.set_mesh(own):
        frozen.verify(reference)
    check_equal(output, plain)
