"""A controlled entropy bonus, from the rollout to the loss and the next state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_turns
import toys

from rlhf_jax import grpo, kl_control, masked, rewards, state
from rlhf_jax.algorithms.policy_gradient.iteration import make_experience
from rlhf_jax.algorithms.policy_gradient.options import EntropyTarget
from rlhf_jax.algorithms.policy_gradient.update import update
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference.frozen import FrozenModels

SCORES = np.array([0.5, -1.0, 0.25, 2.0, -0.5, 1.0], np.float32)
RECIPE = grpo.GRPO(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=toy_turns.SIZE,
    stop_ids=toys.STOP,
    penalty=Penalty(placement=None),
    group_size=2,
    num_minibatches=3,
    entropy_control=EntropyTarget(1.5, increment=0.02, largest=0.5),
)
made = toys.jit(make_experience, static_argnames=("recipe",))
updated = toys.jit(update, static_argnames=("recipe",))


def fresh(coef):
    return state.grpo_state(
        policy=toys.params(scale=0.15),
        policy_optimizer=RECIPE.policy_optimizer,
        kl=kl_control.fixed(0.0),
        entropy_coef=coef,
    )


def experience(entropy, *, coef=0.1, recipe=RECIPE, scores=None):
    """An experience with one entropy for all tokens, or one per row."""
    rollout = toy_turns.rollout()
    rollout = dataclasses.replace(
        rollout, entropy=jnp.where(rollout.response_mask, entropy, 9.0)
    )
    return made(
        fresh(coef),
        rollout=rollout,
        scores=toys.array(SCORES) if scores is None else scores,
        frozen=FrozenModels(),
        recipe=recipe,
    )


@pytest.mark.parametrize(
    ("entropy", "applied", "after"),
    [(1.4, 0.1, 0.12), pytest.param(1.6, 0.0, 0.08, marks=pytest.mark.slow)],
)
def test_the_entropy_of_a_rollout_sets_its_bonus_and_the_next(entropy, applied, after):
    moved, of_rollout, stats, _ = experience(entropy)
    assert float(moved.entropy_coef) == pytest.approx(after)
    np.testing.assert_allclose(of_rollout.entropy_coef, np.full(6, applied), rtol=1e-6)
    means = masked.mean_stats(stats)
    assert float(means["objective/entropy_coef"]) == pytest.approx(applied)
    plain = dataclasses.replace(RECIPE, entropy_control=None, entropy_coef=applied)
    key = {"key": jax.random.key(3)}
    ours, stats = updated(moved, experience=of_rollout, recipe=RECIPE, **key)
    alone = dataclasses.replace(of_rollout, entropy_coef=None)
    expected, _ = updated(fresh(None), experience=alone, recipe=plain, **key)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        ours.policy,
        expected.policy,
    )
    assert float(ours.entropy_coef) == pytest.approx(after)
    assert "loss/entropy" in stats


def test_without_a_token_there_is_no_entropy():
    left_out = rewards.Scores(toys.array(SCORES), left_out=np.ones(6, bool))
    moved, of_rollout, _, _ = experience(1.4, scores=left_out)
    assert float(moved.entropy_coef) == np.float32(0.1)
    np.testing.assert_array_equal(of_rollout.entropy_coef, np.zeros(6))


def test_greedy_responses_do_not_count():
    """Samples have an entropy of 1.4, their greedy baselines a larger one."""
    recipe = dataclasses.replace(RECIPE, baseline="greedy")
    entropy = np.array([[1.4], [5.0]] * 3, np.float32)
    moved, of_rollout, _, _ = experience(entropy, recipe=recipe)
    assert float(moved.entropy_coef) == pytest.approx(0.12)
    np.testing.assert_allclose(of_rollout.entropy_coef, np.full(6, 0.1), rtol=1e-6)
    # Nor are their scores in the running moments, by which scores are normalised.
    assert float(moved.scores.count) == 3
    assert float(moved.scores.mean) == pytest.approx(SCORES[::2].mean())
    assert float(moved.scores.variance) == pytest.approx(SCORES[::2].var())
    left_out = np.arange(6) == 2
    scores = rewards.Scores(toys.array(SCORES), left_out=left_out)
    moved, *_ = experience(entropy, recipe=recipe, scores=scores)
    assert float(moved.scores.mean) == pytest.approx(SCORES[[0, 4]].mean())


@pytest.mark.slow
def test_micro_batches_have_the_same_bonus():
    _, of_rollout, _, _ = experience(1.4)
    key = {"key": jax.random.key(3)}
    whole, _ = updated(fresh(0.1), experience=of_rollout, recipe=RECIPE, **key)
    small = dataclasses.replace(RECIPE, micro_batch_size=1)
    parts, _ = updated(fresh(0.1), experience=of_rollout, recipe=small, **key)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        whole.policy,
        parts.policy,
    )


def test_a_state_without_a_coefficient_is_refused():
    with pytest.raises(InputError, match="a state with an entropy_coef"):
        experience(1.4, coef=None)
    with pytest.raises(InputError, match="target: expected a finite number above 0"):
        EntropyTarget(0.0)
    with pytest.raises(InputError, match=r"entropy_coef: expected .* at most 0\.5"):
        dataclasses.replace(RECIPE, entropy_coef=0.6)
