"""GRPO and RLOO against loops, by hand and by what they must not do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import batch, grpo, kl_control, masked, policy, rewards, state
from rlhf_jax.algorithms.flow import rollout, score
from rlhf_jax.algorithms.policy_gradient import options
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels

pytestmark = pytest.mark.usefixtures("quick_compilation")
LR = 0.1
POLICY, OTHER = toys.params(), toys.params(seed=3)
KEY = jax.random.key(9)
BASE = grpo.GRPO(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(LR),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    group_size=4,
)

update = toys.jit(grpo.update, static_argnames=("recipe",))
iterate = toys.jit(grpo.iteration, static_argnames=("recipe",))


def groups(*, num_prompts: int = 2, group_size: int = 4) -> batch.Prompts:
    """A few prompts, each repeated in adjacent rows."""
    single = toys.prompts((4, 2)[:num_prompts])
    repeated = jax.tree.map(lambda leaf: jnp.repeat(leaf, group_size, axis=0), single)
    sample = jnp.tile(jnp.arange(group_size, dtype=jnp.int32), num_prompts)
    return dataclasses.replace(repeated, sample=sample)


def shifted(shift: jax.Array, answered: batch.Rollout) -> jax.Array:
    """The share of even response tokens plus an offset, f32[B]."""
    is_even = (answered.tokens % 2 == 0).astype(jnp.float32)
    return shift + masked.masked_mean(is_even, mask=answered.response_mask, axis=1)


# An argument of the program, so that it is compiled once for all shifts.
even = jax.tree_util.Partial(shifted, jnp.zeros(8))
broken = jax.tree_util.Partial(shifted, jnp.zeros(8).at[3].set(jnp.nan))


def fresh(settings: grpo.GRPO = BASE, *, kl_coef: float = 0.1) -> state.TrainState:
    return state.grpo_state(
        policy=jax.tree.map(jnp.copy, POLICY),
        policy_optimizer=settings.policy_optimizer,
        kl=kl_control.fixed(kl_coef),
    )


def run(reward=even):
    return iterate(
        fresh(),
        prompts=groups(),
        frozen=FrozenModels(reference=toys.freeze(OTHER)),
        reward=reward,
        key=KEY,
        recipe=BASE,
    )


def distance(left, right) -> float:
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, left, right)))


@pytest.fixture(scope="module")
def scored():
    """A scored rollout of a policy other than the reference, with k1 in the reward."""
    sample = toys.jit(grpo.sample, static_argnames=("recipe",))
    answered = sample(POLICY, prompts=groups(), key=KEY, recipe=BASE)
    compute = toys.jit(
        score.score, static_argnames=("model", "max_new_tokens", "temperature")
    )
    return compute(
        answered,
        scores=even(answered),
        reference=toys.freeze(OTHER),
        model=toys.GPT2,
        max_new_tokens=toys.SIZE,
        temperature=0.7,
    )


# Groups


group_experience = toys.jit(
    grpo.group_experience, static_argnames=("group_size", "baseline", "normalise")
)


@pytest.mark.slow
def test_a_group_s_prompt_is_run_once_and_gives_the_same_samples():
    options = {
        "model": toys.GPT2,
        "prompts": groups(),
        "key": KEY,
        "max_new_tokens": toys.SIZE,
        "stop_ids": toys.STOP,
        "temperature": 0.7,
    }
    sample = toys.jit(
        rollout.rollout,
        static_argnames=(
            *("model", "max_new_tokens", "stop_ids", "temperature", "group_size"),
        ),
    )
    alone = sample(POLICY, **options)
    together = sample(POLICY, **options, group_size=4)
    np.testing.assert_array_equal(together.tokens, alone.tokens)
    np.testing.assert_array_equal(together.response_mask, alone.response_mask)
    np.testing.assert_allclose(together.old_logprobs, alone.old_logprobs, atol=1e-5)
    with pytest.raises(InputError, match="divide the 8 rows"):
        rollout.rollout(POLICY, **options, group_size=3)
    # Two rows run through the layers, not eight.
    flops = [
        sample.lower(POLICY, **options, group_size=size).cost_analysis()
        for size in (1, 4)
    ]
    assert flops[1]["flops"] < flops[0]["flops"]


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("baseline", "normalise"),
    [
        ("group", None),
        ("group", "group"),
        ("group", "rollout"),
        ("leave_one_out", None),
        ("length_weighted", None),
    ],
)
def test_group_experience_against_loops(scored, baseline, normalise):
    experience, stats = group_experience(
        scored, kl_coef=0.3, group_size=4, baseline=baseline, normalise=normalise
    )
    mask = np.asarray(scored.rollout.response_mask)
    rewards = oracles.token_rewards(
        np.asarray(scored.scores), np.asarray(scored.kl), mask, 0.3
    )
    np.testing.assert_allclose(experience.token_rewards, rewards, atol=1e-6)
    totals = np.array(
        [row[inside].sum() for row, inside in zip(rewards, mask, strict=True)]
    )
    expected = np.zeros(mask.shape)
    for b, t in oracles.entries(mask):
        if baseline == "group":
            relative = oracles.group_relative(totals, 4, normalise == "group")
            expected[b, t] = relative[b]
        elif baseline == "length_weighted":
            lengths = mask.sum(axis=1)
            expected[b, t] = oracles.length_weighted(totals, lengths, 4)[b]
        else:
            expected[b, t] = oracles.leave_one_out(totals, 4)[b]
    if normalise == "rollout":
        expected = oracles.masked_whiten(expected, mask)
    np.testing.assert_allclose(experience.advantages, expected, rtol=1e-4, atol=1e-5)
    means = masked.mean_stats(stats)
    spread = totals.reshape(2, 4).std(axis=1, ddof=1).mean()
    assert float(means["group/std"]) == pytest.approx(spread, rel=1e-4)
    assert float(means["group/equal_fraction"]) == 0.0


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_equal_groups_teach_nothing_and_are_counted(scored, baseline):
    scores = scored.scores.at[:4].set(0.7)
    experience, stats = group_experience(
        dataclasses.replace(scored, scores=scores, kl=None),
        kl_coef=0.3,
        group_size=4,
        baseline=baseline,
        normalise="group" if baseline == "group" else None,
    )
    np.testing.assert_array_equal(experience.advantages[:4], 0.0)
    assert float(jnp.abs(experience.advantages[4:]).max()) > 0.1
    means = masked.mean_stats(stats)
    assert float(means["group/equal_fraction"]) == 0.5
    spread = np.asarray(scores[4:]).std(ddof=1) / 2
    assert float(means["group/std"]) == pytest.approx(spread, abs=1e-5)


# One update, by hand.


def by_hand(params, experience, *, kl_coef, weights):
    """The surrogate and k2, from all logits, as a mean over tokens."""
    logits = policy.logits(
        params, model=toys.GPT2, tokens=experience.tokens, mask=experience.mask
    )
    chances = jax.nn.softmax(logits / 0.7)[:, :-1]
    picked = (jax.nn.one_hot(experience.tokens[:, 1:], 13) * chances).sum(-1)
    m = experience.response_mask[:, 1:].astype(jnp.float32)
    chance = jnp.where(m > 0, picked, 1.0)
    ratio = chance / jnp.exp(experience.old_logprobs[:, 1:])
    advantage = experience.advantages[:, 1:]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    x = jnp.log(chance) - experience.ref_logprobs[:, 1:]
    of_tokens = (-gain + kl_coef * 0.5 * x**2) * m
    return (of_tokens * jnp.broadcast_to(weights, of_tokens.shape)).sum()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("aggregation", "factor"),
    [
        pytest.param("token_mean", None, marks=pytest.mark.long),  # test_ppo.py
        pytest.param("sequence_mean", None, marks=pytest.mark.slow),
        pytest.param("constant", None, marks=pytest.mark.slow),
        pytest.param("constant", 2.5, marks=pytest.mark.long),  # test_ppo_by_hand.py
    ],
)
def test_an_update_is_one_step_down_the_gradient(scored, aggregation, factor):
    experience, _ = grpo.group_experience(
        dataclasses.replace(scored, kl=None),
        kl_coef=0.3,
        group_size=4,
        baseline="group",
        normalise="group",
    )
    # As if the policy had moved since it sampled, so that some ratios are clipped.
    noise = np.random.default_rng(0).normal(0, 0.3, experience.tokens.shape)
    moved = experience.old_logprobs + jnp.where(experience.response_mask, noise, 0.0)
    experience = dataclasses.replace(experience, old_logprobs=moved.astype(jnp.float32))
    settings = dataclasses.replace(
        BASE, aggregation=aggregation, loss_scale_factor=factor
    )
    after, stats = update(
        fresh(kl_coef=0.3), experience=experience, key=KEY, recipe=settings
    )
    rows = np.asarray(experience.response_mask)
    lengths = rows.sum(axis=1, keepdims=True)
    assert np.ptp(lengths) > 0
    constant = toys.SIZE if factor is None else factor
    divisor = {
        "token_mean": rows.sum(),
        "sequence_mean": len(rows) * lengths,
        "constant": len(rows) * constant,
    }[aggregation]
    grads = toys.jit(jax.grad(by_hand))(
        POLICY, experience, kl_coef=0.3, weights=jnp.asarray(1 / divisor, jnp.float32)
    )
    expected = jax.tree.map(lambda p, g: p - LR * g, POLICY, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        after.policy,
        expected,
    )
    norm = float(optax.tree.norm(grads))
    assert float(stats["policy/grad_norm"][0]) == pytest.approx(norm, rel=1e-4)
    assert int(after.step) == 1
    # There is no critic, in memory or in the logs.
    assert after.critic is None
    assert after.critic_opt is None
    assert not any(
        name.startswith(("critic/", "value/", "loss/value")) for name in stats
    )


@pytest.mark.long  # the same code as PPO's
def test_micro_batches_change_nothing(scored):
    experience, _ = grpo.group_experience(
        scored, kl_coef=0.3, group_size=4, baseline="leave_one_out", normalise=None
    )
    whole, whole_stats = update(fresh(), experience=experience, key=KEY, recipe=BASE)
    cut = dataclasses.replace(BASE, micro_batch_size=2)
    parts, part_stats = update(fresh(), experience=experience, key=KEY, recipe=cut)
    assert distance(whole.policy, parts.policy) < 1e-6
    assert distance(whole.policy, POLICY) > 1e-3
    whole_means, part_means = (
        masked.mean_stats(stats) for stats in (whole_stats, part_stats)
    )
    assert whole_means.keys() == part_means.keys()
    for name, value in whole_means.items():
        np.testing.assert_allclose(part_means[name], value, rtol=1e-4, atol=1e-5)


# An iteration


@pytest.fixture(scope="module")
def usual():
    return run()


@pytest.mark.slow
def test_an_iteration_moves_the_policy_towards_the_reward(usual):
    after, stats, scored = usual
    means = masked.mean_stats(stats)
    expected = float(even(scored.rollout).mean())
    assert float(means["objective/scores"]) == pytest.approx(expected, rel=1e-5)
    assert float(means["objective/kl"]) > 0
    assert float(means["loss/kl"]) > 0
    assert 0 <= float(means["group/equal_fraction"]) <= 1
    assert distance(after.policy, POLICY) > 1e-3
    current, first = fresh(), float("nan")
    for number in range(12):
        current, stats, _ = iterate(
            current,
            prompts=groups(),
            frozen=FrozenModels(reference=toys.freeze(POLICY)),
            reward=even,
            key=jax.random.fold_in(KEY, number),
            recipe=BASE,
        )
        mean = float(masked.mean_stats(stats)["objective/scores"])
        first = mean if number == 0 else first
    assert mean > first + 0.2


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_a_group_of_two_prompts_has_no_advantage(scored, baseline):
    """Such a group is invalid, since its prompt is read once; the update is skipped."""
    index = scored.rollout.index.at[1].add(100)
    rollout_ = dataclasses.replace(scored.rollout, index=index)
    experience, _ = group_experience(
        dataclasses.replace(scored, rollout=rollout_),
        kl_coef=0.3,
        group_size=4,
        baseline=baseline,
        normalise=None,
    )
    mask = np.asarray(scored.rollout.response_mask)
    assert np.isnan(np.asarray(experience.advantages)[:4][mask[:4]]).all()
    assert np.isfinite(np.asarray(experience.advantages)[4:]).all()


@pytest.mark.long
@pytest.mark.slow
def test_the_published_recipe_learns():
    fitted = dataclasses.replace(grpo.published.DEEPSEEK_MATH, group_size=4)
    settings = grpo.GRPO(
        **vars(fitted),
        model=toys.GPT2,
        policy_optimizer=optax.adam(3e-3),
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
    )
    current, means = fresh(settings, kl_coef=0.01), []
    for number in range(20):
        current, stats, _ = iterate(
            current,
            prompts=groups(),
            frozen=FrozenModels(reference=toys.freeze(POLICY)),
            reward=even,
            key=jax.random.fold_in(KEY, number),
            recipe=settings,
        )
        means.append(float(masked.mean_stats(stats)["objective/scores"]))
    assert np.mean(means[-5:]) > np.mean(means[:5]) + 0.1


@pytest.mark.slow
def test_a_score_that_is_not_a_number_skips_the_update():
    after, stats, _ = run(broken)
    assert toys.leaves_equal(after.policy, POLICY)
    assert int(after.skipped) == 1
    assert float(masked.mean_stats(stats)["update/skipped"]) == 1.0


@pytest.mark.slow
def test_a_batch_that_is_left_out_whole_moves_nothing():
    """No KL was measured: a KL of 0 would lower the coefficient."""
    recipe = dataclasses.replace(BASE, equal_groups="leave_out")
    adaptive = kl_control.Adaptive(target=6.0, unit="response", horizon=40)
    start = dataclasses.replace(fresh(recipe), kl=adaptive.controller(0.1))
    after, stats, _ = iterate(
        start,
        prompts=groups(),
        frozen=FrozenModels(reference=toys.freeze(OTHER)),
        reward=None,
        key=KEY,
        recipe=recipe,
    )
    assert float(stats["group/equal_fraction"][0]) == 2
    assert float(after.kl.kl_coef) == np.float32(0.1)
    assert toys.leaves_equal(after.policy, POLICY)
    assert int(after.skipped) == 0


@pytest.mark.slow
def test_greedy_responses_have_the_record_that_centred_scores_read():
    recipe = dataclasses.replace(
        BASE, baseline="greedy", surrogate=options.Centred(top_k=3)
    )
    after, stats, scored = iterate(
        fresh(recipe),
        prompts=groups(),
        frozen=NO_MODELS,
        reward=even,
        key=KEY,
        recipe=recipe,
    )
    top = scored.rollout.top_k
    assert top.tokens.shape == (*scored.rollout.tokens.shape, 3)
    last = np.arange(8) % 4 == 3
    response = np.asarray(scored.rollout.response_mask) & last[:, None]
    drawn, likeliest = scored.rollout.tokens, np.asarray(top.tokens)[..., 0]
    np.testing.assert_array_equal(np.asarray(drawn)[response], likeliest[response])
    assert int(after.skipped) == 0
    assert float(masked.mean_stats(stats)["policy/top_mass"]) > 0


@pytest.mark.slow
def test_without_a_reference_no_kl_is_taken():
    _, stats, scored = jax.eval_shape(
        functools.partial(grpo.iteration, recipe=BASE),
        fresh(kl_coef=0.0),
        prompts=groups(),
        frozen=NO_MODELS,
        reward=even,
        key=KEY,
    )
    assert scored.ref_logprobs is None
    assert not {"objective/kl", "loss/kl"} & set(stats)
    assert "loss/policy" in stats


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("recipe", [grpo.published.DEEPSEEK_MATH, grpo.published.RLOO])
def test_every_option_reaches_the_function_that_reads_it(monkeypatch, recipe):
    """Their effects are tested above; nothing is compiled here."""
    read = {}

    def record(function):
        def recorded(*args, **options):
            read.update(options)
            return function(*args, **options)

        return recorded

    for place, function in {
        "grpo.recipe.group_experience": grpo.group_experience,
        "policy_gradient.algorithm.policy_terms": policy_terms,
    }.items():
        monkeypatch.setattr(f"rlhf_jax.algorithms.{place}", record(function))
    settings = dataclasses.replace(BASE, **vars(recipe))
    settings = dataclasses.replace(settings, group_size=4)
    _, stats, _ = jax.eval_shape(
        functools.partial(grpo.iteration, recipe=settings),
        fresh(),
        prompts=groups(),
        frozen=FrozenModels(reference=toys.freeze(OTHER)),
        reward=even,
        key=KEY,
    )
    assert read["baseline"] == recipe.baseline
    assert read["normalise"] == recipe.normalise
    assert read["group_size"] == settings.group_size
    assert read["recipe"] == settings
    assert ("loss/kl" in stats) == recipe.penalty.in_loss
    assert "group/std" in stats


def test_the_parts_of_a_reward_are_logged_by_name():
    parts = {"even": (1.0, even), "late": (0.5, broken)}
    _, stats, _ = jax.eval_shape(
        functools.partial(grpo.iteration, recipe=BASE),
        fresh(),
        prompts=groups(),
        frozen=FrozenModels(reference=toys.freeze(OTHER)),
        reward=rewards.weighted(parts),
        key=KEY,
    )
    assert {"reward/even", "reward/late", "objective/scores"} <= set(stats)


# What they are called


def test_each_recipe_has_the_gradient_of_its_paper():
    assert grpo.GroupRecipe().penalty.gradient == "fixed-state reverse"
    assert grpo.published.DEEPSEEK_MATH.penalty.gradient == "fixed-state forward"
    assert grpo.published.RLOO.penalty.gradient == "full reverse"
    for recipe in (grpo.published.DEEPSEEK_MATH, grpo.published.RLOO):
        made = grpo.GRPO(
            **vars(recipe),
            model=toys.GPT2,
            policy_optimizer=optax.sgd(LR),
            max_new_tokens=toys.SIZE,
            stop_ids=toys.STOP,
        )
        assert hash(made) == hash(dataclasses.replace(made))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "expected at least 2"),
        ({"group_size": 0}, "expected at least 2"),
        ({"baseline": None}, "baseline: expected one of"),
        ({"baseline": "mean"}, "baseline: expected one of"),
        ({"normalise": "std"}, "normalise: expected one of"),
        ({"normalise": "group", "baseline": "leave_one_out"}, "is not the baseline"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        grpo.GroupRecipe(**options)


def test_a_state_with_a_critic_is_refused(scored):
    experience, _ = grpo.group_experience(
        scored, kl_coef=0.3, group_size=4, baseline="group", normalise=None
    )
    other = dataclasses.replace(fresh(), critic=POLICY, critic_opt=())
    with pytest.raises(InputError, match="expected a state without a critic"):
        grpo.update(other, experience=experience, key=KEY, recipe=BASE)


def test_groups_that_do_not_divide_the_batch_are_refused():
    settings = dataclasses.replace(BASE, group_size=3)
    with pytest.raises(InputError, match="divide the 8 rows"):
        grpo.sample(POLICY, prompts=groups(), key=KEY, recipe=settings)
