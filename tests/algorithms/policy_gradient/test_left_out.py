"""Responses without a score are not trained on, with any method."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_turns
import toys

from rlhf_jax import frozen, grpo, kl_control, online_dpo, ppo, rewards, state
from rlhf_jax.algorithms import distill, nash_md
from rlhf_jax.algorithms.flow import selection
from rlhf_jax.algorithms.flow.rollout import leave_out
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.iteration import learn, make_experience
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.algorithms.reinforce import REINFORCE
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_LOSS
from rlhf_jax.roles import policy
from rlhf_jax.roles.reference.frozen import FrozenModels

KEY = jax.random.key(5)
SHAPE = {
    "model": toys.GPT2,
    "policy_optimizer": optax.sgd(0.1),
    "max_new_tokens": toy_turns.SIZE,
    "stop_ids": toys.STOP,
    "scores": ScoreShaping(normalise=True),
}
VALUED = SHAPE | {"critic_model": toys.GPT2, "critic_optimizer": optax.sgd(0.1)}
GROUP = SHAPE | {"group_size": 2}
RECIPES = {
    "PPO": ppo.PPO(**VALUED, whiten_rewards="rollout"),
    "N+": ppo.PPO(**VALUED, value_after_stop=True, num_minibatches=3),
    "GRPO": grpo.GRPO(**GROUP, penalty=IN_LOSS, normalise="group"),
    "RLOO": grpo.GRPO(
        **GROUP, baseline="leave_one_out", normalise=None, aggregation="prompt_mean"
    ),
    "DAPO": grpo.GRPO(**GROUP, equal_groups="leave_out", overlong_mask="group"),
    "REINFORCE++": REINFORCE(**SHAPE),
    "online DPO": online_dpo.OnlineDPO(**GROUP),
    "Nash-MD": nash_md.NashMD(**SHAPE),
    "distillation": distill.Distill(**SHAPE, rewarded=True),
}
OUT = np.arange(6) == 2
SCORES = np.array([0.5, -1.0, 0.25, 2.0, -0.5, 1.0], np.float32)


def rollout(seed=0):
    """A rollout whose row 2 depends on the seed."""
    whole = toy_turns.rollout()
    rng = np.random.default_rng(seed)
    row = OUT[:, None] & toy_turns.SAMPLED
    words = np.where(row, rng.integers(3, 20, row.shape), whole.tokens)
    old = np.where(row, rng.normal(-2, 0.5, row.shape), whole.old_logprobs)
    return dataclasses.replace(
        whole, tokens=toys.array(words, np.int32), old_logprobs=toys.array(old)
    )


def fresh(recipe):
    own = {
        "policy": toys.params(scale=0.15),
        "policy_optimizer": recipe.policy_optimizer,
        "kl": kl_control.fixed(0.2),
    }
    if recipe.critic is None:
        return state.grpo_state(**own)
    return state.ppo_state(
        **own, critic=toys.scorer(), critic_optimizer=recipe.critic_optimizer
    )


def learned(recipe, *, rollout, score, left_out=OUT):
    program = toys.jit(learn, static_argnames=("recipe",))
    return program(
        fresh(recipe),
        rollout=rollout,
        scores=rewards.Scores(
            jnp.asarray(np.where(OUT, np.float32(score), SCORES)),
            left_out=jnp.asarray(left_out),
        ),
        frozen=FrozenModels(reference=frozen.freeze(toys.params(seed=3, scale=0.15))),
        key=KEY,
        recipe=recipe,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_failure_pays_no_more_than_an_empty_response(name):
    """State and stats do not depend on the failed response, to the bit."""
    recipe = RECIPES[name]
    empty = leave_out(rollout(), rows=jnp.asarray(OUT))
    assert not np.asarray(empty.response_mask)[OUT].any()
    expected, stats, _ = learned(recipe, rollout=empty, score=0.0)
    for seed, score in ((1, 1e6), (2, np.nan)):
        output, others, scored = learned(recipe, rollout=rollout(seed), score=score)
        assert toys.leaves_equal(output, expected)
        for key, pair in stats.items():
            np.testing.assert_array_equal(others[key], pair, err_msg=key)
        assert not np.asarray(scored.rollout.response_mask)[OUT].any()
        assert not np.asarray(scored.rollout.mask)[OUT, toy_turns.PROMPT :].any()
    reported = np.arange(0, 6, 2 if name == "Nash-MD" else 1)  # of the policy
    assert tuple(map(float, stats["reward/left_out"])) == (1, len(reported))
    scored = SCORES[reported][~OUT[reported]]
    total, count = map(float, stats["objective/scores"])
    assert (total, count) == (scored.sum(), len(scored))
    counted, *_ = learned(
        recipe, rollout=rollout(), score=0.25, left_out=np.zeros(6, bool)
    )
    assert not toys.leaves_equal(counted.policy, expected.policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PPO", "N+", "REINFORCE++", "distillation"])
def test_what_is_whitened_is_what_it_is_without_the_row(name):
    recipe = dataclasses.replace(RECIPES[name], num_minibatches=1)
    reference = frozen.freeze(toys.params(seed=3, scale=0.15))

    def made(rows, **left_out):
        _, experience, _, _ = make_experience(
            fresh(recipe),
            rollout=jax.tree.map(lambda x: x[rows], rollout()),
            scores=rewards.Scores(jnp.asarray(SCORES[rows]), **left_out),
            frozen=FrozenModels(reference=reference),
            recipe=recipe,
        )
        return np.asarray(experience.advantages)

    with_row = made(np.arange(6), left_out=jnp.asarray(OUT))
    without = made(np.flatnonzero(~OUT))
    assert not with_row[OUT].any()
    np.testing.assert_allclose(with_row[~OUT], without, rtol=1e-4, atol=1e-5)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_a_group_s_advantages_are_those_of_the_group_without_it(baseline):
    """Groups of three with a failure equal groups of two."""
    options = SHAPE | {"baseline": baseline, "normalise": None}
    out = np.array([False, True, False, True, False, False])

    def made(rows, *, group_size, **masks):
        scored = toy_turns.scored()
        scored = dataclasses.replace(
            scored,
            scores=toys.array(SCORES),
            turn_rewards=None,
            kl=None,
            rollout=dataclasses.replace(
                scored.rollout, index=toys.array(np.arange(6) // 3, np.int32)
            ),
        )
        scored = jax.tree.map(lambda x: x[rows], scored)
        if masks:
            scored = dataclasses.replace(
                scored,
                rollout=leave_out(scored.rollout, rows=~masks["row_mask"]),
                **masks,
            )
        experience_of = toys.jit(grpo.GRPO(**options, group_size=group_size).experience)
        experience, stats = experience_of(scored, kl_coef=jnp.float32(0.0))
        return np.asarray(experience.advantages), stats

    output, stats = made(np.arange(6), group_size=3, row_mask=jnp.asarray(~out))
    alone, others = made(np.flatnonzero(~out), group_size=2)
    np.testing.assert_array_equal(output[~out], alone)
    assert not output[out].any()
    np.testing.assert_array_equal(stats["group/std"], others["group/std"])


@pytest.mark.slow
def test_a_pair_is_of_responses_that_have_scores():
    """The best and the worst of the responses with a score; one alone makes no pair."""
    recipe = dataclasses.replace(
        RECIPES["online DPO"], group_size=3, labels="bradley_terry"
    )
    row_mask = jnp.asarray([True, False, True, False, False, True])
    scored = dataclasses.replace(
        toy_turns.scored(),
        scores=toys.array([1.0, 9.0, 3.0, 1.0, 2.0, 5.0]),
        row_mask=row_mask,
    )
    made, stats = recipe.experience(scored, kl_coef=jnp.float32(0.0))
    np.testing.assert_array_equal(made.pairs, [True, False])
    np.testing.assert_array_equal(
        made.tokens[0], np.asarray(scored.rollout.tokens)[[2, 0]].reshape(-1)
    )
    assert tuple(map(float, stats["pair/score_gap"])) == (2.0, 1.0)
    assert tuple(map(float, stats["pair/tied_fraction"])) == (0.0, 1.0)


@pytest.mark.parametrize("out", [0, 1])
def test_the_mixture_s_failure_leaves_the_pair_out_too(out):
    row_mask = np.arange(6) != out
    scored = dataclasses.replace(
        toy_turns.scored(), scores=toys.array(SCORES), row_mask=jnp.asarray(row_mask)
    )
    made, stats = RECIPES["Nash-MD"].experience(scored, kl_coef=jnp.float32(0.0))
    assert not np.asarray(made.response_mask)[:2].any()
    assert np.asarray(made.response_mask)[[2, 4]].any(axis=1).all()
    wins = 1 / (1 + np.exp(-(SCORES[[2, 4]] - SCORES[[3, 5]])))
    total, count = map(float, stats["pair/win"])
    assert (total, count) == (pytest.approx(wins.sum()), 2)


@pytest.mark.slow
def test_a_group_without_two_scores_is_drawn_again():
    def drawn(scores, out, first):
        rows = jnp.arange(first, first + 4, dtype=jnp.int32)
        return (
            dataclasses.replace(
                jax.tree.map(lambda x: x[:4], toy_turns.rollout()), sample=rows
            ),
            rewards.Scores(toys.array(scores), left_out=jnp.asarray(out)),
        )

    batch = drawn([1, 0, 1, 0], [False, True, False, False], 0)
    other = drawn([0, 1, 0, 1], [True, False, False, False], 4)
    mixed, scores = selection.refilled(batch, other, group_size=2)
    np.testing.assert_array_equal(mixed.sample, [6, 7, 2, 3])
    assert not np.asarray(scores.left_out).any()


def test_a_sum_leaves_out_what_a_reward_with_a_weight_does():
    def reward(scores, out):
        made = rewards.Scores(
            toys.array(scores), left_out=None if out is None else jnp.asarray(out)
        )
        return lambda rollout: made

    of_tests, of_judge = (
        reward([2, 0, 4], np.ones(3) == [0, 1, 0]),
        [False] * 2 + [True],
    )
    scores = rewards.weighted(
        {
            "tests": (1.0, of_tests),
            "judge": (0.0, reward([5, 5, 5], of_judge)),
            "length": (0.5, reward([1, 1, 1], None)),
        }
    )(None)
    np.testing.assert_array_equal(scores.left_out, [False, True, False])
    stats = {
        name: tuple(map(float, pair))
        for name, pair in rewards.part_stats(scores).items()
    }
    assert stats == {
        "reward/tests": (6, 2),
        "reward/tests/left_out": (1, 3),
        "reward/judge": (10, 2),
        "reward/judge/left_out": (1, 3),
        "reward/length": (3, 3),
        "reward/left_out": (1, 3),
    }
    unweighted = rewards.weighted({"judge": (0.0, reward([5, 5, 5], of_judge))})(None)
    assert unweighted.left_out is None


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("out", [np.zeros(2, bool), np.zeros(3, np.float32)])
def test_what_is_left_out_is_one_bool_a_response(out):
    with pytest.raises(InputError, match=r"expected left_out as bool\[3\]"):
        rewards.scores_of(rewards.Scores(jnp.zeros(3), left_out=jnp.asarray(out)))


def test_worse_responses_that_the_policy_has_left_are_not_in_the_loss():
    """The mask uses the sampler's log-probs although the ratio uses the trainer's."""
    recipe = RECIPES["RLOO"]
    scored = dataclasses.replace(toy_turns.scored(), scores=toys.array(SCORES))
    made, _ = recipe.experience(scored, kl_coef=0.0)
    params, mask = toys.params(scale=0.15), np.asarray(made.response_mask)
    shape = {"model": toys.GPT2, "temperature": recipe.temperature}
    texts = {"tokens": made.tokens, "mask": made.mask}
    logprobs = jax.jit(functools.partial(policy.logprobs, **shape))
    now = np.asarray(logprobs(params, **texts))
    by_row = np.linspace(-0.3, 0.3, 6)[:, None]  # nats per token
    made = dataclasses.replace(
        made, sampler_logprobs=jnp.asarray(now + by_row, jnp.float32)
    )
    worse = np.asarray(made.advantages).min(axis=1) < 0
    left_out = worse & (by_row[:, 0] > 0.1)
    assert 0 < left_out.sum() < worse.sum()

    @functools.partial(jax.jit, static_argnames=("recipe",))
    def terms(params, experience, recipe):
        def loss(params):
            output = policy_terms(
                params,
                experience=experience,
                kl_coef=0.0,
                num_tokens=jnp.float32(mask.sum()),
                num_responses=jnp.float32(6),
                recipe=recipe,
            )
            return output.loss, output.stats

        return jax.value_and_grad(loss, has_aux=True)(params)

    masking = dataclasses.replace(recipe, off_policy_mask=0.1)
    (value, stats), gradient = terms(params, made, masking)
    kept = jnp.where(left_out[:, None], 0.0, made.advantages)
    by_hand = dataclasses.replace(made, advantages=kept)
    (expected, _), others = terms(params, by_hand, recipe)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), gradient, others)
    share, count = stats["policy/off_policy_masked"]
    assert (float(share), float(count)) == (mask[left_out].sum(), mask.sum())
