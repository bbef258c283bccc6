"""The choice of tokens in the policy loss, from the recipe to the gradient."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toy_turns
import toys

from rlhf_jax import grpo, kl_control, ppo, state
from rlhf_jax.algorithms.policy_gradient.iteration import learn, make_experience
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.algorithms.policy_gradient.options import ClipCov, KLCov, TopEntropy
from rlhf_jax.algorithms.policy_gradient.token_choice import choose
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference.frozen import FrozenModels

SCORES = np.array([0.5, -1.0, 0.25, 2.0, -0.5, 1.0], np.float32)
SHAPE = {
    "model": toys.GPT2,
    "policy_optimizer": optax.sgd(0.1),
    "max_new_tokens": toy_turns.SIZE,
    "stop_ids": toys.STOP,
    "penalty": Penalty(placement=None),
}
RLOO = grpo.GRPO(**SHAPE, group_size=2, baseline="leave_one_out")
CHOICES = {
    "top entropy": TopEntropy(0.3),
    "Clip-Cov": ClipCov(0.2, low=0.1, high=2.0),
    "KL-Cov": KLCov(0.3, coef=0.6),
}
ENTROPY = np.random.default_rng(3).uniform(0.1, 2.0, toy_turns.SAMPLED.shape)


chosen = toys.jit(choose, static_argnames=("choice",))


@functools.cache
def drawn():
    """A scored rollout, and its experience without a choice of tokens."""
    scored = dataclasses.replace(toy_turns.scored(), scores=toys.array(SCORES))
    rollout = dataclasses.replace(scored.rollout, entropy=toys.array(ENTROPY))
    experience, _ = toys.jit(RLOO.experience)(scored, kl_coef=jnp.float32(0.0))
    return rollout, experience


def made(choice, *, seed=0, step=0):
    """The recipe, the experience with its chosen tokens, and stats."""
    rollout, experience = drawn()
    key = jax.random.fold_in(jax.random.key(seed), step)
    output = chosen(experience, rollout=rollout, key=key, choice=choice)
    return dataclasses.replace(RLOO, token_choice=choice), *output


def covariances(experience):
    """The covariances by token, and their inputs."""
    cells = oracles.entries(np.asarray(experience.response_mask))
    pairs = np.array(
        [
            (experience.old_logprobs[cell], experience.advantages[cell])
            for cell in cells
        ],
        np.float64,
    )
    about = pairs - pairs.mean(axis=0)
    return dict(zip(cells, about[:, 0] * about[:, 1], strict=True))


@functools.partial(toys.jit, static_argnames=("recipe",))
def terms(params, experience, recipe, counted=None):
    """(loss, stats) and gradient, with the counts of a mask as divisors."""
    mask = experience.response_mask if counted is None else counted

    def loss(params):
        output = policy_terms(
            params,
            experience=experience,
            kl_coef=0.0,
            num_tokens=mask.sum(dtype=jnp.float32),
            num_responses=mask.any(axis=1).sum(dtype=jnp.float32),
            recipe=recipe,
        )
        return output.loss, output.stats

    return jax.value_and_grad(loss, has_aux=True)(params)


def replaced(experience, advantages, *, chosen):
    """The experience with other chosen tokens."""
    mask = experience.response_mask
    tokens = jnp.full_like(mask, chosen)
    return dataclasses.replace(experience, advantages=advantages, chosen=tokens)


def close(left, right):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), left, right
    )


def test_the_largest_entropies_alone_are_trained():
    recipe, experience, stats = made(CHOICES["top entropy"])
    cells = oracles.entries(np.asarray(experience.response_mask))
    count = int(0.3 * len(cells))
    best = set(sorted(cells, key=lambda cell: -ENTROPY[cell])[:count])
    assert {cell for cell in cells if experience.chosen[cell]} == best
    assert tuple(map(float, stats["policy/chosen"])) == (count, len(cells))
    by_hand = np.zeros(ENTROPY.shape, np.float32)
    for cell in best:
        by_hand[cell] = experience.advantages[cell]
    params = toys.params(scale=0.2)
    (value, _), gradient = terms(params, experience, recipe)
    alone = replaced(experience, toys.array(by_hand), chosen=True)
    (expected, _), others = terms(params, alone, recipe)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    close(gradient, others)
    everything = replaced(experience, experience.advantages, chosen=True)
    assert abs(float(terms(params, everything, recipe)[0][0] - expected)) > 1e-3


def test_clip_cov_leaves_out_a_share_within_its_bounds():
    drawn = []
    for seed, step in itertools.product((0, 1), range(3)):
        recipe, experience, stats = made(CHOICES["Clip-Cov"], seed=seed, step=step)
        found = covariances(experience)
        within = {cell for cell, x in found.items() if 0.1 < x < 2.0}
        left_out = {cell for cell in found if not experience.chosen[cell]}
        assert left_out <= within
        assert len(left_out) == int(0.2 * len(found)) < len(within)
        kept, count = map(float, stats["policy/chosen"])
        assert (kept, count) == (len(found) - len(left_out), len(found))
        drawn.append(frozenset(left_out))
    assert len({*drawn}) > 3  # by chance, and of each seed and iteration its own
    params = toys.params(scale=0.2)
    (value, _), _ = terms(params, experience, recipe)
    kept = jnp.where(experience.chosen, experience.advantages, 0.0)
    alone = replaced(experience, kept, chosen=True)
    assert float(value) == pytest.approx(float(terms(params, alone, recipe)[0][0]))


def test_kl_cov_holds_the_largest_covariances():
    recipe, experience, _ = made(CHOICES["KL-Cov"])
    found = covariances(experience)
    count = int(0.3 * len(found))
    best = set(sorted(found, key=lambda cell: -found[cell])[:count])
    assert {cell for cell in found if experience.chosen[cell]} == best
    params = toys.params(scale=0.2)
    (value, stats), _ = terms(params, experience, recipe)
    none = replaced(experience, experience.advantages, chosen=False)
    (plain, _), _ = terms(params, none, recipe)
    held, tokens = map(float, stats["loss/kl_cov"])
    assert held > 0
    assert tokens == len(found)
    assert float(value - plain) == pytest.approx(0.6 * held / tokens, rel=1e-4)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", CHOICES)
def test_parts_of_a_minibatch_add_up(name):
    recipe, experience, _ = made(CHOICES[name])
    params = toys.params(scale=0.2)
    mask = experience.response_mask
    (value, _), gradient = terms(params, experience, recipe, mask)
    whole, parts = experience.response_mask, []
    for number in (0, 1):
        rows = (jnp.arange(len(whole)) % 2 == number)[:, None]
        part = dataclasses.replace(experience, response_mask=whole & rows)
        parts.append(terms(params, part, recipe, whole))
    assert sum(float(part) for (part, _), _ in parts) == pytest.approx(float(value))
    close(jax.tree.map(jnp.add, *(part for _, part in parts)), gradient)


@pytest.mark.slow
def test_advantages_that_ppo_whitens_stay_0_where_no_token_is_chosen():
    """An iteration chooses from its own rollout, at its own step."""
    choice = TopEntropy(0.3)
    recipe = ppo.PPO(
        **SHAPE,
        critic_model=toys.GPT2,
        critic_optimizer=optax.sgd(0.1),
        whiten_advantages="minibatch",
        token_choice=choice,
    )
    rollout, experience = drawn()
    fresh = state.ppo_state(
        policy=toys.params(scale=0.15),
        policy_optimizer=recipe.policy_optimizer,
        critic=toys.scorer(),
        critic_optimizer=recipe.critic_optimizer,
        kl=kl_control.fixed(0.0),
    )
    program = toys.jit(make_experience, static_argnames=("recipe",))
    _, whole, stats, _ = program(
        fresh,
        rollout=rollout,
        scores=toys.array(SCORES),
        frozen=FrozenModels(),
        recipe=recipe,
    )
    expected, _ = choose(experience, rollout=rollout, key=None, choice=choice)
    np.testing.assert_array_equal(whole.chosen, expected.chosen)
    assert float(stats["policy/chosen"][0]) == int(expected.chosen.sum())
    minibatch, _ = recipe.minibatch_loss(whole, kl_coef=jnp.float32(0.0))
    others = np.asarray(minibatch.response_mask & ~minibatch.chosen)
    assert np.abs(np.asarray(minibatch.advantages)[others]).min() > 0
    params = toys.params(scale=0.2)
    (value, _), _ = terms(params, minibatch, recipe)
    kept = jnp.where(minibatch.chosen, minibatch.advantages, 0.0)
    alone = replaced(minibatch, kept, chosen=True)
    assert float(value) == pytest.approx(float(terms(params, alone, recipe)[0][0]))


def test_an_iteration_hands_its_key_to_clip_cov():
    """Of each seed its own tokens, which are not those of the sampler's key."""
    choice = ClipCov(0.2, low=-10.0, high=10.0)
    recipe = dataclasses.replace(RLOO, token_choice=choice)
    rollout, experience = drawn()
    fresh = state.grpo_state(
        policy=toys.params(scale=0.15),
        policy_optimizer=recipe.policy_optimizer,
        kl=kl_control.fixed(0.0),
    )
    program = toys.jit(
        functools.partial(make_experience, frozen=FrozenModels(), recipe=recipe)
    )
    learned = toys.jit(functools.partial(learn, frozen=FrozenModels(), recipe=recipe))
    arguments = {"rollout": rollout, "scores": toys.array(SCORES)}
    left_out = []
    for seed in range(3):
        key = jax.random.key(seed)
        _, whole, *_ = program(fresh, **arguments, key=key)
        expected, _ = choose(experience, rollout=rollout, key=key, choice=choice)
        np.testing.assert_array_equal(whole.chosen, expected.chosen)
        left_out.append(np.asarray(whole.chosen).tobytes())
        _, stats, _ = learned(fresh, **arguments, key=key)
        kept = expected.chosen & experience.response_mask
        assert float(stats["policy/chosen"][0]) == int(kept.sum())
    assert len({*left_out}) == 3
    with pytest.raises(InputError, match="key: expected one for Clip-Cov, got none"):
        choose(experience, rollout=rollout, key=None, choice=choice)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopEntropy(0.0), "share: expected a finite number above 0"),
        (lambda: TopEntropy(1.5), "share: expected a number from 0 to 1"),
        (lambda: ClipCov(low=2.0, high=1.0), "high: expected a number above 2"),
        (lambda: KLCov(coef=0.0), "coef: expected a finite number above 0"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
