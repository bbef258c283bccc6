"""A critic with its own programs, compared with PPO as one program."""

import dataclasses
import functools
import types
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import batch, frozen, kl_control, masked, ppo, state
from rlhf_jax.algorithms import optimizers
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.ppo import critic_apart
from rlhf_jax.algorithms.state import PackedParts
from rlhf_jax.devices import critic_devices, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.lora import LoRA, init
from rlhf_jax.roles.critic import from_base
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels

LR = 0.1
POLICY = toys.params()
CRITIC = toys.scorer(seed=1)
BASE = ppo.PPO(
    model=toys.GPT2,
    critic_model=toys.GPT2,
    policy_optimizer=optax.sgd(LR),
    critic_optimizer=optax.sgd(LR),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=2,
    num_minibatches=2,
)
KEY = jax.random.key(9)
OF_THE_CRITIC = {"loss/value", "value/clipfrac", "critic/grad_norm"}

together = toys.jit(ppo.update, static_argnames=("recipe",))
policy_alone = toys.jit(ppo.update, static_argnames=("recipe",))
apart = toys.jit(critic_apart.update, static_argnames=("recipe",))


def fresh(settings: ppo.PPO, critic=CRITIC) -> state.TrainState:
    return state.ppo_state(
        policy=jax.tree.map(jnp.copy, POLICY),
        critic=jax.tree.map(jnp.copy, critic),
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(0.1),
    )


def fresh_apart(settings: ppo.PPO) -> tuple[state.TrainState, state.SupervisedState]:
    return state.grpo_state(
        policy=jax.tree.map(jnp.copy, POLICY),
        policy_optimizer=settings.policy_optimizer,
        kl=kl_control.fixed(0.1),
    ), state.supervised_state(
        jax.tree.map(jnp.copy, CRITIC), optimizer=settings.critic_optimizer
    )


def close(left, right, *, rtol=1e-4, atol=1e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right
    )


@pytest.fixture(scope="module")
def experience():
    """An experience with a value after the last token, so that all masks differ."""
    rollout = toys.sampled(POLICY)
    longer = score.value_mask(rollout, after_stop=True)
    assert (longer & ~rollout.response_mask).any()
    return dataclasses.replace(toys.experience(rollout), value_mask=longer)


FIRST = "rewards whitened over the minibatch, in parts, clipped, by Adam"
WAYS = {
    FIRST: {
        "whiten_rewards": "minibatch",
        "whiten_advantages": "minibatch",
        "lam": 0.5,
        "micro_batch_size": 1,
        "critic_optimizer": optax.chain(
            optax.clip_by_global_norm(0.01), optimizers.adam(1e-2)
        ),
        "vf_coef": 0.7,
        "value_clip_range": 0.01,
    },
    "the policy waits for the critic": {
        "critic_warmup": 1,
        "value_after_stop": True,
        "aggregation": "sequence_mean",
    },
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", [FIRST, "the policy waits for the critic"])
def test_two_programs_do_what_one_does(experience, way):
    settings = dataclasses.replace(BASE, **WAYS[way])
    expected, expected_stats = together(
        fresh(settings), experience=experience, key=KEY, recipe=settings
    )
    policy, critic = fresh_apart(settings)
    policy, stats = policy_alone(
        policy, experience=experience, key=KEY, recipe=settings
    )
    critic, critic_stats = apart(
        critic, experience=experience, key=KEY, recipe=settings
    )
    close(policy.policy, expected.policy)
    close(policy.policy_opt, expected.policy_opt)
    close(critic.params, expected.critic)
    close(critic.opt, expected.critic_opt)
    assert policy.critic is None
    assert int(policy.step) == 1
    assert int(critic.step) == settings.num_epochs * settings.num_minibatches
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), critic.params, CRITIC)
    assert max(jax.tree.leaves(moved)) > 1e-4
    means = masked.mean_stats(stats | critic_stats)
    extra = {"critic/skipped", "critic/skipped_in_a_row"}
    assert means.keys() == expected_stats.keys() | extra
    assert not OF_THE_CRITIC & stats.keys()
    close(
        {name: means[name] for name in expected_stats},
        masked.mean_stats(expected_stats),
    )


def test_beside_the_policy_s_loss_a_rejected_response_has_values_too(
    experience, monkeypatch
):
    loss_options = {}
    monkeypatch.setattr(
        "rlhf_jax.algorithms.ppo.recipe.ppo_loss",
        lambda *_, **options: loss_options.update(options),
    )
    accepted = experience.response_mask.at[1].set(False)
    minibatch, loss = BASE.minibatch_loss(
        dataclasses.replace(experience, response_mask=accepted),
        kl_coef=jnp.float32(0),
        frozen=NO_MODELS,
    )
    loss((None, None), minibatch)
    assert (int(loss_options["num_responses"]), int(loss_options["num_valued"])) == (
        3,
        4,
    )


@pytest.mark.parametrize(
    ("emptied", "valued"), [("response_mask", 4), ("value_mask", 3)]
)
def test_the_loss_is_told_the_values_and_the_responses_of_a_minibatch(
    experience, monkeypatch, emptied, valued
):
    """Not those of a micro-batch; rejected responses have values, empty rows none."""

    def counts(critic, experience, *, num_values, num_valued, **_):
        loss = critic["score"]["bias"].sum() * experience.mask.sum()
        one = jnp.ones(())
        return loss, {"values": (num_values, one), "responses": (num_valued, one)}

    monkeypatch.setattr(critic_apart, "critic_loss", counts)
    settings = dataclasses.replace(
        BASE, num_epochs=1, num_minibatches=1, micro_batch_size=1
    )
    mask = getattr(experience, emptied).at[1].set(False)
    experience = dataclasses.replace(experience, **{emptied: mask})
    _, stats = toys.jit(critic_apart.update, static_argnames=("recipe",))(
        fresh_apart(settings)[1],
        experience=experience,
        key=KEY,
        recipe=settings,
    )
    means = masked.mean_stats(stats)
    assert means["values"] == np.asarray(experience.value_mask).sum()
    assert means["responses"] == valued


@pytest.mark.slow
def test_adapters_are_read_over_their_base_wherever_they_are_read():
    """Traced but not run; without its base an adapter cannot be used."""
    lora = LoRA(rank=2)
    recipe = dataclasses.replace(BASE, lora=lora)

    def iterate(base, prompts, key):
        train = state.ppo_state(
            policy=init(key, model=toys.GPT2, lora=lora),
            critic=from_base(key, model=toys.GPT2, lora=lora),
            policy_optimizer=recipe.policy_optimizer,
            critic_optimizer=recipe.critic_optimizer,
            kl=kl_control.fixed(0.1),
        )
        return train, ppo.iteration(
            train,
            prompts=prompts,
            frozen=FrozenModels(reference=base, base=base),
            reward=reward,
            key=key,
            recipe=recipe,
        )

    before, (after, *_) = jax.eval_shape(
        iterate, toys.freeze(POLICY), toys.prompts(), KEY
    )
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)


def test_values_are_those_of_the_state():
    rollout = toys.sampled(POLICY)
    output = critic_apart.values(CRITIC, rollout=rollout, recipe=BASE)
    close(output, ppo.values(fresh(BASE), rollout=rollout, recipe=BASE))
    assert jnp.abs(output).max() > 0.1


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_the_critic_alone(experience):
    row = experience.returns.at[0].set(jnp.nan)
    broken = dataclasses.replace(experience, returns=row)
    settings = dataclasses.replace(BASE, num_epochs=1)
    policy, critic = fresh_apart(settings)
    critic, stats = apart(critic, experience=broken, key=KEY, recipe=settings)
    policy, _ = policy_alone(policy, experience=broken, key=KEY, recipe=settings)
    means = masked.mean_stats(stats)
    assert means["critic/skipped"] == 0.5  # of two minibatches
    assert means["critic/skipped_in_a_row"] == 1
    assert np.isfinite(means["loss/value"])
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(critic.params))
    assert int(policy.skipped) == 0
    expected, _ = policy_alone(
        fresh_apart(settings)[0], experience=experience, key=KEY, recipe=settings
    )
    close(policy.policy, expected.policy)


@pytest.mark.parametrize(
    ("name", "value"),
    [("shared_trunk", True), ("stop_approxkl", 0.1), ("max_ratio_mean", 10.0)],
)
def test_what_needs_one_program_is_refused(experience, name, value):
    settings = dataclasses.replace(BASE, **{name: value})
    policy, critic = fresh_apart(settings)
    refused = pytest.raises(InputError, match=f"{name}: .*got {value}")
    with refused:
        ppo.update(policy, experience=experience, key=KEY, recipe=settings)
    with refused:
        critic_apart.update(critic, experience=experience, key=KEY, recipe=settings)
    with refused:
        critic_devices.CriticDevices(
            recipe=settings, mesh=MeshShape().make(jax.devices()[:1]), home=None
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, r"pass those of critic_apart\.values"),
        (jnp.zeros((4, 9)), "got a state without a critic; with a critic apart"),
    ],
)
def test_the_policy_is_never_trained_alone_by_accident(values, message):
    with pytest.raises(InputError, match=message):
        ppo.learn(
            fresh_apart(BASE)[0],
            rollout=toys.sampled(POLICY),
            scores=jnp.zeros(4),
            frozen=NO_MODELS,
            key=KEY,
            recipe=BASE,
            values=values,
        )


# On devices of its own.

PLACES = {
    "a device each": (MeshShape(), MeshShape(), None),
    "unlike meshes": (MeshShape(fsdp=2, tensor=2), MeshShape(data=2), None),
    "adapters": (MeshShape(), MeshShape(fsdp=2), LoRA(rank=2)),
}


def reward(rollout: batch.Rollout) -> jax.Array:
    even = (rollout.tokens % 2 == 0).astype(jnp.float32)
    return masked.masked_mean(even, mask=rollout.response_mask, axis=1)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("a device each", marks=pytest.mark.long),
        pytest.param("unlike meshes", marks=pytest.mark.long),  # test_mesh_runs.py
        pytest.param("adapters", marks=pytest.mark.slow),
    ],
)
def test_on_devices_of_its_own(place):
    """Compares three iterations with `ppo.iteration` on one device."""
    shape, placement, lora = PLACES[place]
    settings = dataclasses.replace(BASE, lora=lora)
    if lora is not None:  # at LR they diverge by the third step, and rounding with them
        settings = dataclasses.replace(settings, policy_optimizer=optax.sgd(LR / 10))
    mesh = shape.make(jax.devices()[: shape.size])
    critic_mesh = placement.make(jax.devices()[-placement.size :])
    base, trained, valued = None, POLICY, CRITIC
    if lora is not None:
        base = frozen.freeze(POLICY)
        trained = toys.perturbed(
            init(jax.random.key(2), model=toys.GPT2, lora=lora), seed=2, scale=0.1
        )
        valued = from_base(jax.random.key(3), model=toys.GPT2, lora=lora)
    make = functools.partial(
        state.ppo_state,
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(0.1),
    )
    copies = jax.tree.map(jnp.copy, (trained, valued))
    whole = make(policy=copies[0], critic=copies[1])
    reference = frozen.freeze(POLICY)
    prompts = toys.prompts()
    iteration = toys.jit(
        functools.partial(ppo.iteration, recipe=settings, reward=reward)
    )

    place_home = functools.partial(sharding.place, mesh=mesh)
    policy = place_home(
        state.grpo_state(
            policy=jax.tree.map(jnp.copy, trained),
            policy_optimizer=settings.policy_optimizer,
            kl=kl_control.fixed(0.1),
        )
    )
    home_base = None if base is None else place_home(base)
    home_reference, home_prompts = place_home(reference), place_home(prompts)
    on = functools.partial(sharding.on, mesh)
    sample = toys.jit(functools.partial(on(ppo.sample), recipe=settings))
    make_experience = toys.jit(
        functools.partial(on(ppo.make_experience), recipe=settings),
        donate_argnames=("state",),
    )
    update = toys.jit(
        functools.partial(on(ppo.update), recipe=settings),
        donate_argnames=("state",),
    )
    devices = critic_devices.CriticDevices(
        recipe=settings, mesh=critic_mesh, home=mesh, base=home_base
    )
    critic = devices.state_of(jax.tree.map(jnp.copy, valued))
    for step in range(3):
        key = jax.random.fold_in(KEY, step)
        whole, expected, scored = iteration(
            whole,
            prompts=prompts,
            frozen=FrozenModels(reference=reference, base=base),
            key=key,
        )
        key = place_home(key)
        rollout = sample(
            policy.policy,
            prompts=home_prompts,
            key=key,
            frozen=FrozenModels(base=home_base),
        )
        assert (rollout.tokens == scored.rollout.tokens).all()
        values = devices.values(critic, rollout=rollout)
        policy, experience, stats, _ = make_experience(
            policy,
            rollout=rollout,
            scores=jax.jit(reward)(rollout),
            frozen=FrozenModels(reference=home_reference, base=home_base),
            values=values,
        )
        key = ppo.shuffle_key(key)
        critic, critic_stats = devices.update(critic, experience=experience, key=key)
        policy, update_stats = update(
            policy, experience=experience, key=key, frozen=FrozenModels(base=home_base)
        )
        means = toys.means(jax.device_get(stats | update_stats | critic_stats))
        expected = toys.means(expected)
        close({name: means[name] for name in expected}, expected, atol=1e-5)
    close(policy.policy, whole.policy, atol=1e-5)
    close(critic.params, whole.critic, atol=1e-5)
    for leaf in jax.tree.leaves(critic):
        assert leaf.sharding.device_set == set(critic_mesh.devices.flat)
    assert int(critic.step) == 12


@pytest.mark.slow
def test_a_critic_elsewhere_is_the_one_here(experience):
    """Values and update of a critic on the last of eight devices."""
    settings = dataclasses.replace(BASE, **WAYS[FIRST])
    mesh = MeshShape().make(jax.devices()[-1:])
    home = MeshShape().make(jax.devices()[:1])
    devices = critic_devices.CriticDevices(recipe=settings, mesh=mesh, home=home)
    place_home = functools.partial(sharding.place, mesh=home)
    start = fresh_apart(settings)[1]
    expected, expected_stats = apart(
        start, experience=experience, key=KEY, recipe=settings
    )
    rollout = toys.sampled(POLICY)
    values = devices.values(
        devices.state_of(jax.tree.map(jnp.copy, CRITIC)), rollout=place_home(rollout)
    )
    close(values, critic_apart.values(CRITIC, rollout=rollout, recipe=settings))
    critic, stats = devices.update(
        devices.state_of(jax.tree.map(jnp.copy, CRITIC)),
        experience=place_home(experience),
        key=place_home(KEY),
    )
    close(critic.params, expected.params)
    close(masked.mean_stats(jax.device_get(stats)), masked.mean_stats(expected_stats))
    for leaf in jax.tree.leaves(critic):
        assert leaf.sharding.device_set == {jax.devices()[-1]}


def test_the_critic_reads_responses_alone_and_packed_where_they_are(
    experience, monkeypatch
):
    """Checks the arguments of its loss and values; no model is run."""
    calls = []
    zeros = jnp.zeros(experience.tokens.shape, jnp.float32)

    def values(params, *, first_column, packing, **options):
        calls.append((first_column, packing))
        return zeros

    monkeypatch.setattr(import_module("rlhf_jax.algorithms.ppo.loss"), "values", values)
    counts = {"num_values": jnp.float32(4), "num_valued": jnp.float32(2)}
    loss = import_module("rlhf_jax.algorithms.ppo.loss").critic_loss
    loss(CRITIC, experience=experience, recipe=BASE, packing="how", **counts)
    assert calls.pop() == (experience.tokens.shape[1] - toys.SIZE, "how")

    def response_values(params, *, packing, **options):
        calls.append(packing)
        return zeros

    monkeypatch.setattr(score, "response_values", response_values)
    packing = types.SimpleNamespace(batch="of the batch")
    ppo.values(fresh(BASE), rollout=None, recipe=BASE, packing=packing)
    critic_apart.values(CRITIC, rollout=None, recipe=BASE, packing=packing)
    assert calls == ["of the batch"] * 2


def test_parts_of_packed_rows_reach_the_critic_s_loss(experience, monkeypatch):
    packings = []

    def loss(params, part, *, packing, **options):
        packings.append(packing)
        return jnp.zeros(()), {"loss/value": (jnp.zeros(()), jnp.ones(()))}

    def of_parts(loss, params, minibatch, *, parts):
        _, stats = loss(params, minibatch, packing="a part")
        return jax.tree.map(jnp.zeros_like, params), stats

    def parts(packing, *, steps):
        return PackedParts(None, jnp.ones((steps, 1, 2), bool))

    monkeypatch.setattr(critic_apart, "critic_loss", loss)
    monkeypatch.setattr(critic_apart.state, "accumulate_packed", of_parts)
    monkeypatch.setattr(critic_apart, "packed_parts", parts)
    _, critic = fresh_apart(BASE)
    after, _ = critic_apart.update(critic, experience=experience, key=KEY, recipe=BASE)
    assert set(packings) == {"a part"}
    assert toys.leaves_equal(after.params, CRITIC)
