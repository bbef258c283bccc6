"""The published recipes over groups: their rules and rejected options."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys
from places import FIXTURES

from rlhf_jax import batch, grpo, kl_control, losses, masked, ppo, rewards, state
from rlhf_jax.algorithms.flow import selection, shaping
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.grpo import published
from rlhf_jax.algorithms.policy_gradient import recipe as policy_recipe
from rlhf_jax.algorithms.policy_gradient.options import (
    ClipCov,
    EntropyTarget,
    KLCov,
    TopEntropy,
)
from rlhf_jax.algorithms.policy_gradient.recipe import FixedLength
from rlhf_jax.functional import advantages, policy_losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.roles.rewards.scores import no_moments

RECIPES = {
    "grpo": published.DEEPSEEK_MATH,
    "rloo": published.RLOO,
    "rloo-masked": published.RLOO_MASKED,
    "gspo": published.GSPO,
    "cispo": published.CISPO,
    "sapo": published.SAPO,
    "dapo": published.DAPO,
    "dar": published.DAR,
    "centred": published.CENTRED,
    "dr-grpo": published.DR_GRPO,
    "luspo": published.LUSPO,
    "gmpo": published.GMPO,
    "dppo": published.DPPO,
    "vespo": published.VESPO,
    "topr": published.TOPR,
    "opo": published.OPO,
    "gdpo": published.GDPO,
    "skywork-or1": published.SKYWORK_OR1,
    "remax": published.REMAX,
    "clip-cov": published.CLIP_COV,
    "kl-cov": published.KL_COV,
    "top-entropy": published.TOP_ENTROPY,
    "ema-pg": published.EMA_PG,
    "gradient-penalty": published.GRADIENT_PENALTY,
    "reinforce++-baseline": published.REINFORCE_BASELINE,
}
STOP = 1
LENGTHS = (3, 1, 3, 2, 3, 3, 1, 2)  # of two groups of 4, in 3 columns
ENDED = np.array([0, 1, 1, 1, 0, 0, 1, 1], bool)
SCORES = np.array([1, 0, 2, 0, 5, 7, 4, 4], np.float32)


def scored(scores=SCORES):
    """Responses after a prompt of one token; finished ones contain a stop token."""
    lengths = np.array(LENGTHS)
    mask = np.arange(4)[None, :] <= lengths[:, None]
    tokens = np.where(mask, 5, 0)
    tokens[ENDED, lengths[ENDED]] = STOP
    response_mask = mask & (np.arange(4)[None, :] > 0)
    rows = np.arange(8, dtype=np.int32)
    rollout = batch.Rollout(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.asarray(mask),
        response_mask=jnp.asarray(response_mask),
        old_logprobs=jnp.zeros((8, 4)),
        entropy=jnp.zeros((8, 4)),
        index=jnp.asarray(rows // 4),
        sample=jnp.asarray(rows % 4),
    )
    return batch.Scored(rollout, jnp.asarray(scores), None, None, None)


def experience(scores=SCORES, **options):
    arguments = {"baseline": "group", "normalise": None, "stop_ids": (STOP,)} | options
    return grpo.group_experience(scored(scores), kl_coef=0.0, group_size=4, **arguments)


def of_rows(experience):
    """The advantage of each row, NaN if none of its tokens is trained on."""
    mask = np.asarray(experience.response_mask)
    return np.array(
        [
            row[inside][0] if inside.any() else np.nan
            for row, inside in zip(np.asarray(experience.advantages), mask, strict=True)
        ]
    )


@pytest.mark.slow
def test_what_is_cut_off_leaves_the_loss_and_is_still_in_the_mean():
    output, stats = experience(overlong_mask="loss")
    nan = np.nan
    np.testing.assert_allclose(
        of_rows(output), [nan, -0.75, 1.25, -0.75, nan, nan, -1, -1]
    )
    np.testing.assert_array_equal(
        output.response_mask, scored().rollout.response_mask & ENDED[:, None]
    )
    assert float(masked.mean_stats(stats)["response/masked"]) == 3 / 8


def test_a_group_s_mean_and_deviation_are_of_what_is_kept():
    nan = np.nan
    output, _ = experience(overlong_mask="group", normalise="group")
    std = np.std([0, 2, 0], ddof=1)
    expected = np.array([nan, -2 / 3, 4 / 3, -2 / 3, nan, nan, 0, 0]) / std
    np.testing.assert_allclose(of_rows(output), expected, rtol=1e-4)


def test_each_of_several_rewards_is_normalised_alone():
    """Equal sums may have advantages; a group is equal if all its rewards are."""
    one = np.array([1, 0, 0.5, 0, 3, 3, 3, 3], np.float32)
    other = np.array([2, 2, 2, 2, 10, 10, 10, 20], np.float32)
    parts = (toys.array(one), toys.array(other))
    several = {"rewards": parts, "weights": (1.0, 0.1)}
    batch = dataclasses.replace(scored(np.full(8, 4.0, np.float32)), **several)
    options = {"baseline": "group", "group_size": 4, "kl_coef": 0.0}
    output, stats = grpo.group_experience(batch, normalise="each", **options)
    expected = advantages.decoupled(
        jnp.stack(parts), weights=jnp.array([1.0, 0.1]), group_size=4
    )
    np.testing.assert_array_equal(of_rows(output), expected)
    assert 0.5 < abs(float(expected[0])) < 2
    assert float(masked.mean_stats(stats)["group/equal_fraction"]) == 0
    parts = (parts[0], toys.array(np.where(np.arange(8) < 4, other, 7)))
    equal = dataclasses.replace(batch, rewards=parts)
    _, stats = grpo.group_experience(equal, normalise="each", **options)
    assert float(masked.mean_stats(stats)["group/equal_fraction"]) == 0.5
    # Of weight 0 the first is logged alone, whatever it holds.
    logged = dataclasses.replace(
        equal, rewards=(parts[0].at[5].set(jnp.nan), parts[1]), weights=(0.0, 0.1)
    )
    none, stats = grpo.group_experience(
        logged, normalise="each", equal="leave_out", **options
    )
    assert float(masked.mean_stats(stats)["group/equal_fraction"]) == 1
    assert not none.response_mask.any()
    alone, _ = experience(SCORES, normalise="each")
    of_one = advantages.decoupled(
        toys.array(SCORES[None]), weights=jnp.ones(1), group_size=4
    )
    np.testing.assert_array_equal(of_rows(alone), of_one)


def test_a_greedy_response_is_a_baseline_and_is_not_trained_on():
    output, stats = experience(baseline="greedy")
    nan = np.nan
    np.testing.assert_allclose(of_rows(output), [1, 0, 2, nan, 1, 3, 0, nan])
    means = masked.mean_stats(stats)
    assert float(means["response/masked"]) == 2 / 8
    # Of the samples alone: 1, 0, 2 and 5, 7, 4.
    std = (np.std([1, 0, 2], ddof=1) + np.std([5, 7, 4], ddof=1)) / 2
    assert float(means["group/std"]) == pytest.approx(std)


@pytest.mark.slow
def test_greedy_responses_are_those_of_the_decoder():
    """The last response of each group does not depend on the key; others do."""
    recipe = make(published.REMAX)
    prompts = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, 4, axis=0), toys.prompts((4, 2))
    )
    prompts = dataclasses.replace(prompts, sample=jnp.arange(8) % 4)
    draw = toys.jit(grpo.sample, static_argnames=("recipe",))
    params = toys.params()
    first, second = (
        draw(params, prompts=prompts, key=jax.random.key(seed), recipe=recipe)
        for seed in (0, 1)
    )
    for name in ("index", "sample"):
        np.testing.assert_array_equal(getattr(first, name), getattr(prompts, name))
    np.testing.assert_array_equal(first.tokens[3::4], second.tokens[3::4])
    assert (np.asarray(first.tokens) != np.asarray(second.tokens)).any()
    logits = toys.logits(params, model=toys.GPT2, tokens=first.tokens, mask=first.mask)
    best = np.argmax(np.asarray(logits), axis=-1)
    within = np.asarray(first.response_mask)
    for row in (3, 7):
        columns = np.flatnonzero(within[row])
        np.testing.assert_array_equal(
            first.tokens[row, columns], best[row, columns - 1]
        )
    reported = recipe.reported({"sample": first.sample, "all": jnp.float32(1)})
    np.testing.assert_array_equal(reported["sample"], [0, 1, 2, 0, 1, 2])


def test_a_mean_over_prompts_scales_the_tokens_of_each():
    for aggregation, scaled in (("prompt_mean", True), ("token_mean", False)):
        recipe = make(published.RLOO, aggregation=aggregation)
        output, _ = recipe.experience(scored(), kl_coef=jnp.float32(0))
        assert (output.prompt_scale is not None) == scaled


def test_a_recipe_looks_for_its_own_stop_tokens():
    recipe = make(published.RLOO, overlong_mask="loss")
    output, _ = dataclasses.replace(recipe, stop_ids=(STOP,)).experience(
        scored(), kl_coef=jnp.float32(0)
    )
    np.testing.assert_array_equal(
        output.response_mask, scored().rollout.response_mask & ENDED[:, None]
    )


APART = {
    "grpo": {"group_size": 64, "normalise": "group", "aggregation": "sequence_mean"},
    "rloo": {"group_size": 4, "normalise": None, "baseline": "leave_one_out"},
    "rloo-masked": {"overlong_mask": "group", "baseline": "leave_one_out"},
    "gspo": {"surrogate": published.GSPO.surrogate, "normalise": "group"},
    "cispo": {"surrogate": published.CISPO.surrogate, "temperature": 1.0},
    "sapo": {"surrogate": policy_recipe.SAPO(), "temperature": 1.0},
    "dapo": {"group_size": 16, "temperature": 1.0, "num_minibatches": 16},
    "centred": {"surrogate": policy_recipe.Centred(128), "group_size": 8},
    "dar": {"surrogate": policy_recipe.DAR(0.05, 0.1, 20.0), "normalise": "rollout"},
    "dr-grpo": {"group_size": 8, "temperature": 1.0, "num_minibatches": 8},
    "luspo": {"surrogate": published.LUSPO.surrogate, "loss_scale_factor": 1.0},
    "gmpo": {"surrogate": policy_recipe.GMPO(), "aggregation": "sequence_mean"},
    "dppo": {"surrogate": policy_recipe.DPPO(), "aggregation": "constant"},
    "vespo": {"surrogate": policy_recipe.VESPO(), "normalise": None},
    "topr": {"surrogate": policy_recipe.TOPR(), "num_minibatches": 1},
    "opo": {"baseline": "length_weighted", "num_epochs": 1},
    "remax": {"group_size": 2, "baseline": "greedy", "aggregation": "constant"},
    "skywork-or1": {"entropy_control": EntropyTarget(0.2, 0.005, 1.0)},
    "gdpo": {"normalise": "each", "aggregation": "sequence_mean"},
    "clip-cov": {"token_choice": ClipCov(2e-4, low=1.0, high=5.0)},
    "kl-cov": {"token_choice": KLCov(2e-3, coef=1.0)},
    "top-entropy": {"token_choice": TopEntropy(0.2), "equal_groups": "leave_out"},
    "ema-pg": {"group_size": 5, "penalty": published.EMA_PG.penalty},
    "gradient-penalty": {"gradient_penalty": policy_recipe.GradientPenalty(0.01)},
    "reinforce++-baseline": {"group_size": 8, "temperature": 1.0},
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_tells_the_recipes_apart_stays(name):
    options = vars(RECIPES[name])
    assert {key: options[key] for key in APART[name]} == APART[name]


def test_dapo_charges_for_the_last_4096_of_20480_tokens():
    charged = published.DAPO.scores
    assert charged.overlong_after + charged.overlong_buffer == 20_480
    assert (charged.overlong_buffer, charged.overlong_penalty) == (4096, 1.0)


def test_what_is_cut_off_leaves_the_baseline_too():
    output, stats = experience(overlong_mask="group", baseline="leave_one_out")
    nan = np.nan
    np.testing.assert_allclose(of_rows(output), [nan, -1, 2, -1, nan, nan, 0, 0])
    means = masked.mean_stats(stats)
    assert float(means["group/equal_fraction"]) == 0.5  # of what is kept
    assert float(means["response/masked"]) == 3 / 8


def test_equal_groups_are_left_out_of_what_the_loss_is_divided_by():
    equal = np.where(np.arange(8) < 4, 3, SCORES).astype(np.float32)
    output, stats = experience(equal, equal="leave_out", prompt_mean=True)
    assert not np.asarray(output.response_mask)[:4].any()
    np.testing.assert_array_equal(
        output.response_mask[4:], scored().rollout.response_mask[4:]
    )
    np.testing.assert_allclose(of_rows(output)[4:], [0, 2, -1, -1])
    np.testing.assert_allclose(output.prompt_scale[4:], 9 / 4)  # N_p over B/P = 4
    assert float(masked.mean_stats(stats)["response/masked"]) == 0.5
    assert experience(equal)[0].prompt_scale is None


@pytest.mark.slow
def test_whitening_is_over_what_is_trained_on():
    output, _ = experience(normalise="rollout", overlong_mask="loss")
    mask = np.asarray(output.response_mask)
    values = np.asarray(output.advantages)[mask]
    assert values.mean() == pytest.approx(0, abs=1e-6)
    assert values.std() == pytest.approx(1, rel=1e-5)


def test_the_soft_overlong_penalty_is_trl_s():
    recorded = np.load(FIXTURES / "trl_policy_gradients.npz")
    lengths = recorded["lengths"]
    mask = np.arange(40)[None, :] < lengths[:, None]
    rollout = dataclasses.replace(
        scored().rollout, response_mask=jnp.asarray(mask), tokens=jnp.asarray(mask * 5)
    )
    scores = shaping.shape(
        jnp.zeros(len(lengths)),
        moments=no_moments(),
        rollout=rollout,
        stop_ids=(STOP,),
        shaping=ScoreShaping(
            overlong_penalty=0.5, overlong_after=12, overlong_buffer=8
        ),
    )
    np.testing.assert_allclose(scores, 0.5 * recorded["overlong"], atol=1e-6)


def test_a_penalty_of_overlong_responses_fits_the_longest_response():
    """A penalty of some tokens, and a penalty of 0 with any other numbers."""
    charged = ScoreShaping(
        overlong_penalty=1.0, overlong_after=toys.SIZE - 1, overlong_buffer=1
    )
    recipe = dataclasses.replace(make(published.RLOO), scores=charged)
    assert recipe.scores == charged
    longer = dataclasses.replace(charged, overlong_after=toys.SIZE)
    with pytest.raises(InputError, match=r"overlong_after: expected a number below"):
        dataclasses.replace(recipe, scores=longer)


def test_groups_of_equal_scores_are_replaced_in_turn():
    def drawn(scores, first):
        rollout = scored().rollout
        number = jnp.arange(first, first + 8, dtype=jnp.int32)
        return (
            dataclasses.replace(rollout, sample=number),
            rewards.Scores(jnp.asarray(scores, jnp.float32), {"part": number * 1.0}),
        )

    batch_ = drawn([1, 1, 0, 1, 0, 0, 2, 2], 0)
    other = drawn([0, 0, 1, 0, 1, 1, 3, 4], 8)
    rollout, scores = selection.refilled(batch_, other, group_size=2)
    # Groups 0 and 2 take groups 1 and 3; nothing is left for the last one.
    np.testing.assert_array_equal(rollout.sample, [10, 11, 2, 3, 14, 15, 6, 7])
    np.testing.assert_array_equal(scores.total, [1, 0, 0, 1, 3, 4, 2, 2])
    np.testing.assert_array_equal(scores.parts["part"], rollout.sample)
    again, _ = selection.refilled((rollout, scores), batch_, group_size=2)
    np.testing.assert_array_equal(again.sample, [10, 11, 2, 3, 14, 15, 2, 3])
    assert advantages.equal_groups(scores.total, group_size=2).sum() == 1


MADE = {
    "model": toys.GPT2,
    "policy_optimizer": optax.sgd(0.1),
    "max_new_tokens": toys.SIZE,
    "stop_ids": toys.STOP,
}


def make(recipe, **changes):
    fitted = dataclasses.replace(
        recipe,
        group_size=4,
        num_minibatches=1,
        scores=shaping.AS_THEY_ARE,
        **changes,
    )
    return grpo.GRPO(**vars(fitted), **MADE)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize(
    "name",
    [
        name if name == "cispo" else pytest.param(name, marks=pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_each_recipe_s_choices_reach_its_loss(name, monkeypatch):
    recipe, read = RECIPES[name], {}
    if name == "ema-pg":  # of a vocabulary as small as the toy's
        penalty = dataclasses.replace(recipe.penalty, top_k=4)
        recipe = dataclasses.replace(recipe, penalty=penalty)
    if name == "centred":
        recipe = dataclasses.replace(recipe, surrogate=policy_recipe.Centred(4))
    recipe = make(recipe)

    def record(function):
        def recorded(**options):
            read.update(options, function=function.__name__)
            return function(**options)

        return recorded

    for function in (losses.policy_loss, losses.cispo_loss, losses.sapo_loss):
        monkeypatch.setattr(policy_recipe.losses, function.__name__, record(function))
    for name_ in (
        "dar_loss",
        "dppo_loss",
        "gmpo_loss",
        "vespo_loss",
        "topr_loss",
        "centred_loss",
    ):
        function = getattr(policy_losses, name_)
        monkeypatch.setattr(policy_losses, name_, record(function))
    prompts = jax.tree.map(lambda leaf: jnp.repeat(leaf, 4, axis=0), toys.prompts((4,)))
    jax.eval_shape(
        functools.partial(grpo.iteration, recipe=recipe),
        state.grpo_state(
            policy=toys.params(),
            policy_optimizer=MADE["policy_optimizer"],
            kl=kl_control.fixed(0.1),
            entropy_coef=0.0,
        ),
        prompts=prompts,
        frozen=FrozenModels(reference=toys.freeze(toys.params(seed=3))),
        reward=jax.tree_util.Partial(lambda rollout: jnp.arange(4.0)),
        key=jax.random.key(0),
    )
    own = ("cispo", "sapo", "dppo", "gmpo", "vespo", "topr", "dar", "centred")
    expected = f"{name}_loss" if name in own else "policy_loss"
    assert read["function"] == expected
    if name not in own[2:]:
        of_responses = name in ("gspo", "luspo")
        assert read["ratio_level"] == ("sequence" if of_responses else "token")
    assert read["aggregation"] == recipe.aggregation
    bounds = {
        "cispo": {"clip_range": 1.0, "clip_range_high": 4.0},
        "gspo": {"clip_range": 3e-4, "clip_range_high": 4e-4},
        "dapo": {"clip_range": 0.2, "clip_range_high": 0.28},
        "ema-pg": {"clip_range": 0.2, "clip_range_high": 0.28},
        "sapo": {"temperature": 1.0, "negative_temperature": 1.05},
        "dr-grpo": {"loss_scale_factor": toys.SIZE},
        "luspo": {"clip_range": 2e-3, "clip_range_high": 2.5e-3}
        | {"loss_scale_factor": 1.0},
        "gmpo": {"clip_range": 0.4, "clip_range_high": 0.4},
        "dppo": {"divergence": "tv", "threshold": 0.15, "threshold_high": 0.15}
        | {"cap": 20.0},
        "vespo": {"power": 2.0, "decay": 3.0}
        | {"negative_power": 3.0, "negative_decay": 2.0},
        "topr": {},
        "dar": {"beta": 0.05, "share": 0.1, "cap": 20.0},
        "centred": {"cap": None, "floor": None},
        "clip-cov": {"clip_range": 1.0},
        "kl-cov": {"clip_range": 1.0, "clip_range_high": 1e6},
        "top-entropy": {"clip_range": 0.2, "clip_range_high": 0.28},
    }.get(name, {"clip_range": 0.2})
    assert {key: read[key] for key in bounds} == bounds


@pytest.mark.slow
def test_the_kl_of_a_controller_is_per_response_that_is_trained_on():
    recipe = make(published.RLOO, overlong_mask="loss")
    output, _ = experience(overlong_mask="loss")
    mask = np.asarray(output.response_mask)
    wide = {
        field: jnp.pad(getattr(output, field), ((0, 0), (0, toys.SIZE - 3)))
        for field in (
            *("tokens", "mask", "response_mask", "old_logprobs"),
            *("token_rewards", "advantages"),
        )
    }
    output = dataclasses.replace(
        output, **wide, ref_logprobs=jnp.full((8, toys.SIZE + 1), -1.0)
    )
    after, _ = toys.jit(grpo.update, static_argnames=("recipe",))(
        state.grpo_state(
            policy=toys.params(),
            policy_optimizer=recipe.policy_optimizer,
            kl=kl_control.Adaptive(
                target=2.0, unit="response", horizon=1000
            ).controller(0.1),
        ),
        experience=output,
        key=jax.random.key(0),
        recipe=recipe,
    )
    per_response = mask.sum() / mask.any(axis=1).sum()  # 1 nat per token
    expected = oracles.adaptive_kl_coef(0.1, per_response, 8, target=2.0, horizon=1000)
    assert abs(expected - 0.1) > 1e-6
    assert float(after.kl.kl_coef) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (
            lambda: policy_recipe.CISPO(ratio_level="sequence_token"),
            "ratio_level: expected one of 'token', 'sequence', got 'sequence_token'",
        ),
        (
            lambda: dataclasses.replace(published.DAR, off_policy_mask=0.1),
            "off_policy_mask: expected none with surrogate dar",
        ),
        (
            lambda: policy_recipe.Clip(ratio_level="response"),
            "ratio_level: expected one of 'token', 'sequence', 'sequence_token'",
        ),
        (
            lambda: policy_recipe.Clip(clip_range=-0.1),
            "clip_range: expected a finite number above 0",
        ),
        (
            lambda: policy_recipe.CISPO(clip_range_high=-0.2),
            "clip_range_high: expected a finite number above 0",
        ),
        (
            lambda: policy_recipe.Clip(dual_clip=1.0),
            "dual_clip: expected a number above 1",
        ),
        (
            lambda: policy_recipe.Clip(dual_clip=math.inf),
            "dual_clip: expected a number above 1",
        ),
        (
            lambda: policy_recipe.SAPO(temperature_pos=0.0),
            "temperature_pos: expected a finite number above 0",
        ),
        (
            lambda: dataclasses.replace(published.GDPO, baseline="leave_one_out"),
            "normalise: expected 'rollout' or None with baseline 'leave_one_out'",
        ),
        (
            lambda: dataclasses.replace(published.GDPO, penalty=published.RLOO.penalty),
            "normalise: expected another than 'each' with a KL in the reward",
        ),
        (
            lambda: grpo.GroupRecipe(
                kl_to_go=True, normalise="group", baseline="leave_one_out"
            ),
            r"kl_to_go: expected a KL in the reward .*\nnormalise: expected 'rollout'",
        ),
        (
            lambda: dataclasses.replace(published.GDPO, scores=ScoreShaping(clip=1.0)),
            "options of scores, which are about the sum of the rewards",
        ),
        (
            lambda: grpo.GroupRecipe(overlong_mask="all"),
            "overlong_mask: expected one of",
        ),
        (
            lambda: grpo.GroupRecipe(
                overlong_mask="loss", fixed_length=FixedLength(reward_only=True)
            ),
            "overlong_mask: expected none with reward_only of fixed_length",
        ),
        (
            lambda: grpo.GRPO(overlong_mask="loss", **MADE | {"stop_ids": ()}),
            "overlong_mask: expected stop_ids to look for",
        ),
        (
            lambda: ppo.PPO(
                aggregation="prompt_mean",
                critic_model=toys.GPT2,
                critic_optimizer=optax.sgd(0.1),
                **MADE,
            ),
            "aggregation: expected groups of responses to a prompt",
        ),
        (
            lambda: ScoreShaping(overlong_penalty=1.0),
            "overlong_penalty and overlong_buffer together",
        ),
        (
            lambda: ScoreShaping(overlong_after=4),
            "overlong_after: expected an overlong_penalty",
        ),
        (
            lambda: grpo.GRPO(**vars(published.DAPO), **MADE),
            "scores.overlong_after: expected a number below",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make_one, message):
    with pytest.raises(InputError, match=message):
        make_one()
