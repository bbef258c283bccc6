"""Training on every family: PPO, DPO, adapters and int8, on one device and on eight.

CI runs PPO on a decoder with nearly every feature and on adapters over one family;
`-m long` runs every family from its recorded checkpoint.
"""

import functools

import jax
import numpy as np
import optax
import pytest
import tiny
import toys
from places import FIXTURES
from test_families import NAMES

from rlhf_jax import critic, dpo, frozen, hf, kl_control, lora, masked, ppo, state
from rlhf_jax.data import packing
from rlhf_jax.data.examples import Pair
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles.reference.frozen import FrozenModels

LENGTHS = (4, 2, 3, 1) * 2
SGD = optax.sgd(0.1)
ADAPTERS = LoRA(rank=2, alpha=6.0)

DECODERS = {"mixed": tiny.MIXED, "parallel": tiny.PARALLEL, "late": tiny.LATE}
every_model = pytest.mark.parametrize(
    "name",
    [
        pytest.param("mixed", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("parallel", "late", *NAMES)
        ),
    ],
)


@functools.cache
def started(name):
    if name in DECODERS:
        return DECODERS[name], tiny.params(DECODERS[name])
    return hf.load(FIXTURES / name, dtype="float32")


def algorithm(model, **options):
    return ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=SGD,
        critic_optimizer=SGD,
        max_new_tokens=8,
        stop_ids=toys.STOP,
        num_epochs=1,
        num_minibatches=1,
        **options,
    )


def reward(answered):
    """The share of even tokens."""
    even = (answered.tokens % 2 == 0).astype(np.float32)
    return masked.masked_mean(even, mask=answered.response_mask, axis=1)


def first_iteration(name, *, mesh=None, dtype=None, adapters=None):
    """(state, means, initial policy) of an iteration whose reference is the policy."""
    model, params = started(name)
    settings = algorithm(model, lora=adapters)
    base = reference = frozen.freeze(params, dtype=dtype)
    policy, value = params, critic.from_policy(params, model=model)
    if adapters is not None:
        policy = lora.init(jax.random.key(1), model=model, lora=adapters)
        value = critic.from_base(jax.random.key(2), model=model, lora=adapters)
    train = state.ppo_state(
        policy=policy,
        critic=value,
        policy_optimizer=SGD,
        critic_optimizer=SGD,
        kl=kl_control.fixed(0.05),
    )
    prompts = toys.prompts(LENGTHS)
    if mesh is not None:
        train, reference = (sharding.place(x, mesh=mesh) for x in (train, reference))
        prompts = row_sharding.put_rows(prompts, mesh=mesh)
    after, stats, scored = toys.jit(functools.partial(ppo.iteration, recipe=settings))(
        train,
        prompts=prompts,
        frozen=FrozenModels(
            reference=reference, base=None if adapters is None else base
        ),
        reward=jax.tree_util.Partial(reward),
        key=jax.random.key(9),
    )
    return after, toys.means(stats), scored, policy


def distance(one, other):
    apart = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), one, other)
    return max(jax.tree.leaves(apart))


@pytest.mark.long
@every_model
def test_an_iteration_of_ppo_on_one_device_and_on_eight(name):
    after, means, scored, before = first_iteration(name)
    assert np.asarray(scored.rollout.response_mask).sum(axis=1).max() > 4
    np.testing.assert_allclose(
        scored.ref_logprobs, scored.rollout.old_logprobs, atol=2e-5
    )
    assert means["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert distance(after.policy, before) > 1e-4
    shape = MeshShape(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh := shape.make()):
        others, other_means, other_scored, _ = first_iteration(name, mesh=mesh)
    np.testing.assert_array_equal(other_scored.rollout.tokens, scored.rollout.tokens)
    for key, value in means.items():
        np.testing.assert_allclose(other_means[key], value, atol=2e-5, err_msg=key)
    assert distance(others.policy, after.policy) < 2e-5
    assert distance(others.critic, after.critic) < 2e-5


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt_neox", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (*DECODERS, *NAMES)
            if name != "gpt_neox"
        ),
    ],
)
def test_adapters_over_int8(name):
    """The int8 base is the reference, so the initial KL is 0."""
    after, means, scored, before = first_iteration(
        name, dtype="int8", adapters=ADAPTERS
    )
    np.testing.assert_allclose(
        scored.ref_logprobs, scored.rollout.old_logprobs, atol=2e-5
    )
    assert means["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert distance(after.policy, before) > 1e-6


def two_steps_of_dpo(name, *, mesh=None):
    """The means of two steps; the reference is the initial policy."""
    model, params = started(name)
    rng = np.random.default_rng(8)
    words = [rng.integers(3, 13, 4 + i % 3).tolist() for i in range(16)]
    pairs = [
        Pair(words[i][:2], [*words[i][2:], 1], [*words[-1 - i], 2]) for i in range(8)
    ]
    rows = packing.pack(pairs, width=18)
    batch, *_ = packing.packed_in_order(rows, batch_size=4, pad_id=0)
    settings = dpo.DPO(model=model, optimizer=optax.sgd(0.01), beta=0.4)
    train = state.supervised_state(params, optimizer=settings.optimizer)
    reference = frozen.freeze(params)
    if mesh is not None:
        train, reference = (sharding.place(x, mesh=mesh) for x in (train, reference))
        batch = row_sharding.put_rows(batch, mesh=mesh)
    step = toys.jit(dpo.update, static_argnames=("dpo",))
    stats_of_steps = []
    for _ in range(2):
        train, stats = step(train, batch=batch, dpo=settings, reference=reference)
        stats_of_steps.append(
            {k: float(v) for k, v in masked.mean_stats(stats).items()}
        )
    return stats_of_steps


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*DECODERS, *NAMES])
def test_a_step_of_dpo(name):
    """At the reference the loss is log 2; the step decreases it."""
    before, after = two_steps_of_dpo(name)
    assert before["loss/dpo"] == pytest.approx(np.log(2), abs=1e-5)
    assert after["loss/dpo"] < before["loss/dpo"] - 1e-3


@pytest.mark.long
@every_model
def test_a_step_of_dpo_on_eight_devices(name):
    with jax.set_mesh(mesh := MeshShape(data=2, fsdp=2, tensor=2).make()):
        stats_of_steps = two_steps_of_dpo(name, mesh=mesh)
    for mine, other in zip(stats_of_steps, two_steps_of_dpo(name), strict=True):
        assert mine == pytest.approx(other, abs=2e-5)
