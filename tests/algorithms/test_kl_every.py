"""PPO with a KL every N steps: the steps with it and those without it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import kl_control, masked, ppo, state
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.roles.reference.lifecycle import Lifecycle

POLICY = toys.params()
CRITIC = toys.scorer(seed=1)
EVERY = ppo.PPO(
    model=toys.GPT2,
    critic_model=toys.GPT2,
    policy_optimizer=optax.sgd(0.1),
    critic_optimizer=optax.sgd(0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=1,
)
THIRD = dataclasses.replace(EVERY, lifecycle=Lifecycle(kl_every=3, scale_kl_coef=True))
OF_THE_REFERENCE = {"objective/kl", "objective/kl_k3", "objective/ref_nll"}
SCORES = jnp.asarray([1.0, -1.0, 0.5, 2.0])
traced = []  # (whether of THIRD, whether with a reference)


def counted(*args, recipe, frozen, **options):
    traced.append((recipe is THIRD, frozen.reference is not None))
    return ppo.learn(*args, recipe=recipe, frozen=frozen, **options)


learn = toys.jit(counted, static_argnames=("recipe",))


def begin(controller) -> state.TrainState:
    """A policy that differs from the reference."""
    return state.ppo_state(
        policy=toys.perturbed(POLICY, seed=2, scale=0.05),
        critic=jax.tree.map(jnp.copy, CRITIC),
        policy_optimizer=EVERY.policy_optimizer,
        critic_optimizer=EVERY.critic_optimizer,
        kl=controller,
    )


@pytest.fixture(scope="module")
def step():
    reference = toys.freeze(POLICY)
    start = begin(kl_control.fixed(0.0))
    rollout = toys.sampled(start.policy)

    def run(controller, settings, *, with_reference):
        return learn(
            begin(controller),
            rollout=rollout,
            scores=SCORES,
            frozen=FrozenModels(reference=reference if with_reference else None),
            key=jax.random.key(9),
            recipe=settings,
        )

    return run


def weights(current):
    return current.policy, current.critic


@pytest.mark.long
def test_the_scaled_coefficient_is_n_times_as_large(step):
    plain, plain_stats, _ = step(kl_control.fixed(0.75), EVERY, with_reference=True)
    scaled, stats, _ = step(kl_control.fixed(0.25), THIRD, with_reference=True)
    assert toys.leaves_equal(weights(scaled), weights(plain))
    assert toys.leaves_equal(stats, plain_stats)
    assert masked.mean_stats(stats)["objective/kl_coef"] == 0.75
    assert float(scaled.kl.kl_coef) == 0.25  # the controller's own is not scaled
    once, _, _ = step(kl_control.fixed(0.25), EVERY, with_reference=True)
    assert not toys.leaves_equal(weights(once), weights(plain))


@pytest.mark.slow
def test_a_step_between_is_one_without_a_penalty(step):
    between, stats, scored = step(kl_control.fixed(0.25), THIRD, with_reference=False)
    free, free_stats, _ = step(kl_control.fixed(0.0), EVERY, with_reference=True)
    assert scored.ref_logprobs is None
    assert toys.leaves_equal(weights(between), weights(free))
    means = masked.mean_stats(stats)
    assert means.keys() == free_stats.keys() - OF_THE_REFERENCE
    assert means["objective/kl_coef"] == 0.75  # in force, where a KL is taken
    assert means["objective/non_score_reward"] == 0


@pytest.mark.long
@pytest.mark.slow
def test_the_adaptive_coefficient_moves_where_a_kl_was_seen(step):
    controller = kl_control.Adaptive(
        target=0.8, unit="response", horizon=40
    ).controller(0.3)
    settings = dataclasses.replace(THIRD)  # traced beside those that are counted
    after, stats, _ = step(controller, settings, with_reference=True)
    kl = float(masked.mean_stats(stats)["objective/kl"])
    # Twelve responses since the KL before: four a step, of which one in three sees it.
    expected = oracles.adaptive_kl_coef(0.3, kl, 12, target=0.8, horizon=40)
    assert expected != pytest.approx(0.3, rel=1e-3)
    assert float(after.kl.kl_coef) == pytest.approx(expected, rel=1e-5)
    between, _, _ = step(controller, settings, with_reference=False)
    assert float(between.kl.kl_coef) == pytest.approx(0.3)


def test_a_schedule_goes_on_between():
    schedule = optax.linear_schedule(0.2, 0.0, transition_steps=4)
    controller = kl_control.scheduled(schedule, num_steps=20)
    for expected in (0.15, 0.1):
        controller = controller.update(kl=None, num_episodes=4)
        assert float(controller.kl_coef) == pytest.approx(expected)
    fixed = kl_control.fixed(0.5).update(kl=None, num_episodes=4)
    assert float(fixed.kl_coef) == 0.5


@pytest.mark.slow
def test_two_programs_serve_every_step():
    """None is not an array, so a step without the KL is traced once and kept."""
    reference = toys.freeze(POLICY)
    current = begin(kl_control.fixed(0.25))
    rollout = toys.sampled(current.policy)
    kl = []
    for number in range(6):
        takes_kl = THIRD.lifecycle.takes_kl(number)
        current, stats, _ = learn(
            current,
            rollout=rollout,
            scores=SCORES,
            frozen=FrozenModels(reference=reference if takes_kl else None),
            key=jax.random.fold_in(jax.random.key(9), number),
            recipe=THIRD,
        )
        kl.append("objective/kl" in stats)
    assert kl == [True, False, False, True, False, False]
    assert traced.count((True, True)) == traced.count((True, False)) == 1
    assert int(current.step) == 6
    np.testing.assert_array_equal(current.kl.kl_coef, np.float32(0.25))
