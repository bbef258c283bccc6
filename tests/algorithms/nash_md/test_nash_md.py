"""Nash-MD: the sampler of each row, advantages by hand, rejected options."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import kl_control, masked, state
from rlhf_jax.algorithms import nash_md
from rlhf_jax.algorithms.batch import Prompts, Rollout, Scored
from rlhf_jax.algorithms.policy_gradient.options import Centred
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import FrozenModels

pytestmark = pytest.mark.usefixtures("quick_compilation")
MASK = np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], bool)
SCORES = np.array([1.0, 2.5, 0.5, 0.5], np.float32)
TAU = 0.3
BASE = nash_md.NashMD(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    temperature=0.7,
)


def scored():
    rng = np.random.default_rng(0)
    kl = np.where(MASK, rng.normal(size=MASK.shape), 0).astype(np.float32)
    return Scored(
        rollout=Rollout(
            tokens=jnp.zeros(MASK.shape, jnp.int32),
            mask=jnp.ones(MASK.shape, bool),
            response_mask=jnp.asarray(MASK),
            old_logprobs=jnp.zeros(MASK.shape),
            entropy=jnp.zeros(MASK.shape),
            index=jnp.array([0, 0, 1, 1], jnp.int32),
            sample=jnp.arange(4, dtype=jnp.int32),
        ),
        scores=jnp.asarray(SCORES),
        values=None,
        ref_logprobs=jnp.zeros(MASK.shape),
        kl=jnp.asarray(kl),
    )


@pytest.mark.parametrize("labels", ["bradley_terry", "ranked"])
def test_advantages_are_wins_over_the_mixture_less_the_kl(labels):
    both = scored()
    recipe = dataclasses.replace(BASE, labels=labels)
    experience, stats = recipe.experience(both, kl_coef=jnp.float32(TAU))
    wins = {
        "bradley_terry": [1 / (1 + np.exp(1.5)), 0.5],
        "ranked": [0.0, 0.5],
    }[labels]
    rewards = oracles.token_rewards(
        np.repeat(np.array(wins) - 0.5, 2), np.float64(both.kl), MASK, TAU
    )
    expected = np.zeros(MASK.shape)
    for row in (0, 2):
        expected[row][MASK[row]] = rewards[row][MASK[row]].sum()
    np.testing.assert_allclose(experience.advantages, expected, rtol=1e-5, atol=1e-6)
    trained = MASK & (np.arange(4) % 2 == 0)[:, None]
    np.testing.assert_array_equal(experience.response_mask, trained)
    mean = masked.mean_stats(stats)["pair/win"]
    assert float(mean) == pytest.approx(np.mean(wins), rel=1e-5)


def test_statistics_of_the_objective_are_of_the_policy_s_rows():
    both = scored()
    reported = BASE.reported(both)
    np.testing.assert_array_equal(reported.scores, SCORES[0::2])
    np.testing.assert_array_equal(reported.rollout.index, [0, 1])
    np.testing.assert_array_equal(reported.kl, np.asarray(both.kl)[0::2])
    number = {"objective/kl_clipped": (jnp.float32(1), jnp.float32(9))}
    with_stats = dataclasses.replace(both, kl_stats=number)
    assert BASE.reported(with_stats).kl_stats == number


def test_recipes_that_are_refused():
    with pytest.raises(InputError, match="mixture: expected a number above 0 and"):
        dataclasses.replace(BASE, mixture=1.0)
    with pytest.raises(InputError, match="labels: expected one of"):
        dataclasses.replace(BASE, labels="soft")
    with pytest.raises(InputError, match="whose mixture records no likeliest tokens"):
        dataclasses.replace(BASE, surrogate=Centred(top_k=3))
    with pytest.raises(InputError, match="another than 'prompt_mean' for Nash"):
        dataclasses.replace(BASE, aggregation="prompt_mean")
    three = jax.tree.map(lambda x: x[:3], scored().rollout)
    odd = dataclasses.replace(scored(), rollout=three, scores=jnp.zeros(3))
    with pytest.raises(InputError, match="2"):
        BASE.experience(odd, kl_coef=jnp.float32(TAU))


@pytest.mark.slow
def test_an_iteration_learns_from_its_own_rows_alone():
    """Rows of the policy have its log-probs, and the scores of the odd rows matter."""
    prompts = Prompts(
        tokens=jnp.full((8, 2), 5, jnp.int32),
        mask=jnp.ones((8, 2), bool),
        index=jnp.repeat(jnp.arange(4, dtype=jnp.int32), 2),
        sample=jnp.arange(8, dtype=jnp.int32),
    )
    train = state.grpo_state(
        policy=toys.params(),
        policy_optimizer=BASE.policy_optimizer,
        kl=kl_control.fixed(TAU),
    )
    reference = toys.freeze(toys.params(seed=1))
    after, stats, done = toys.jit(nash_md.iteration, static_argnames="recipe")(
        train,
        prompts=prompts,
        frozen=FrozenModels(reference=reference),
        reward=jax.tree_util.Partial(
            lambda rollout: rollout.response_mask.sum(axis=1).astype(jnp.float32)
        ),
        key=jax.random.key(1),
        recipe=BASE,
    )
    means = {name: float(x) for name, x in masked.mean_stats(stats).items()}
    assert means["policy/sampler_mismatch"] < 1e-5
    assert 0 < means["pair/win"] < 1
    assert means["policy/grad_norm"] > 0
    assert not toys.leaves_equal(after.policy, train.policy)
    np.testing.assert_array_equal(done.rollout.index, prompts.index)


def test_rows_of_the_policy_and_of_the_mixture_take_turns(monkeypatch):
    """Checks the calls of both samplers and the order of rows; nothing is sampled."""
    prompts = Prompts(
        tokens=jnp.arange(8, dtype=jnp.int32).reshape(4, 2),
        mask=jnp.ones((4, 2), bool),
        index=jnp.array([0, 0, 1, 1], jnp.int32),
        sample=jnp.arange(4, dtype=jnp.int32),
    )

    def answered(tokens, index, sample, *, logprob):
        shape = (len(tokens), 3)
        return Rollout(
            tokens=jnp.concatenate([tokens, tokens[:, :1]], axis=1),
            mask=jnp.ones(shape, bool),
            response_mask=jnp.ones(shape, bool),
            old_logprobs=jnp.full(shape, logprob),
            entropy=jnp.zeros(shape),
            index=index,
            sample=sample,
        )

    def ours(params, *, prompts, version, **options):
        drawn = answered(prompts.tokens, prompts.index, prompts.sample, logprob=-1.0)
        stamps = None if version is None else jnp.where(drawn.response_mask, version, 0)
        return dataclasses.replace(drawn, version=stamps)

    def mixed(policy, reference, *, share, tokens, keys, **options):
        assert share == BASE.mixture
        drawn = answered(tokens, None, None, logprob=-2.0)
        return types.SimpleNamespace(**vars(drawn) | {"logprobs": drawn.old_logprobs})

    monkeypatch.setattr(nash_md.recipe.flow.rollout, "rollout", ours)
    monkeypatch.setattr(nash_md.recipe.mixture, "generate", mixed)
    reference = toys.freeze(toys.params(seed=1))
    options = {
        "frozen": FrozenModels(reference=reference),
        "prompts": prompts,
        "key": jax.random.key(0),
        "recipe": BASE,
    }
    rollout = nash_md.sample(toys.params(), **options)
    np.testing.assert_array_equal(rollout.tokens[:, :2], prompts.tokens)
    np.testing.assert_array_equal(rollout.index, prompts.index)
    np.testing.assert_array_equal(rollout.sample, prompts.sample)
    np.testing.assert_array_equal(rollout.old_logprobs[:, 0], [-1, -2, -1, -2])
    assert rollout.version is None
    stamped = nash_md.sample(toys.params(), **options, version=jnp.int32(7))
    np.testing.assert_array_equal(stamped.version, np.full((4, 3), 7))
    odd = jax.tree.map(lambda x: x[:3], prompts)
    with pytest.raises(InputError, match="2"):
        nash_md.sample(toys.params(), **options | {"prompts": odd})


def test_what_it_asks_of_a_trainer():
    assert BASE.rows_per_prompt == 2
    assert BASE.leaves_out
