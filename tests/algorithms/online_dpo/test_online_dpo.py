"""Online DPO: which samples make a pair, and its loss, against loops and by hand.

A table of log-probs stands for the model: its "parameters" are those of every token.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import kl_control, masked, online_dpo, state
from rlhf_jax.algorithms.batch import Rollout, Scored
from rlhf_jax.algorithms.online_dpo import pairs as pairs_of
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import NO_MODELS

BETA, RATE = 0.3, 0.1
ROWS, COLUMNS = 8, 5
RNG = np.random.default_rng(5)
MASK = np.arange(COLUMNS)[None, :] >= 2
MASK = MASK & (np.arange(COLUMNS)[None, :] < RNG.integers(3, 6, (ROWS, 1)))
TABLE, OLD, REF = -np.abs(RNG.normal(1, 0.5, (3, ROWS, COLUMNS))).astype(np.float32)
SCORES = np.array([1.0, 3.0, 2.0, 0.5, -1.0, -1.0, 0.0, -1.0], np.float32)
BASE = online_dpo.OnlineDPO(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(RATE),
    max_new_tokens=3,
    stop_ids=toys.STOP,
    group_size=4,
)
BRADLEY_TERRY = dataclasses.replace(BASE, labels="bradley_terry")
NEIGHBOURS = dataclasses.replace(BASE, pairing="neighbours")


def scored(scores=SCORES, ref=REF):
    """Each token is the number of its place, by which the table is read."""
    rollout = Rollout(
        tokens=jnp.arange(ROWS * COLUMNS, dtype=jnp.int32).reshape(ROWS, COLUMNS),
        mask=jnp.ones(MASK.shape, bool),
        response_mask=jnp.asarray(MASK),
        old_logprobs=jnp.asarray(np.where(MASK, OLD, 0)),
        entropy=jnp.zeros(MASK.shape, jnp.float32),
        index=jnp.repeat(jnp.arange(2, dtype=jnp.int32), 4),
        sample=jnp.arange(ROWS, dtype=jnp.int32),
    )
    return Scored(
        rollout=rollout,
        scores=jnp.asarray(scores),
        values=None,
        ref_logprobs=None if ref is None else jnp.asarray(ref),
        kl=None,
    )


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def logprobs(params, *, model, tokens, mask, temperature):
        return params.reshape(-1)[tokens], None

    model = types.SimpleNamespace(logprobs_and_entropy=logprobs)
    monkeypatch.setattr(pairs_of, "policy", model)


def updated(recipe, rollouts, rows=None):
    """(the table after a step, stats), all pairs in one step of `rows` at a time."""

    @toys.jit
    def step(rollouts):
        experience, stats = recipe.experience(rollouts, kl_coef=jnp.float32(BETA))
        minibatch, loss = recipe.minibatch_loss(
            experience, kl_coef=jnp.float32(BETA), frozen=NO_MODELS
        )
        (slope, _), more = state.accumulate(
            loss, (jnp.asarray(TABLE), None), minibatch, micro_batch_size=rows
        )
        return slope, masked.mean_stats(stats | more)

    slope, means = step(rollouts)
    after = TABLE - RATE * np.asarray(slope)
    return after, {name: float(x) for name, x in means.items()}


def leads(pairs):
    """h of each (chosen, rejected) in float64."""
    ratios = np.where(MASK, np.float64(TABLE) - REF, 0).sum(axis=1)
    return np.array([ratios[c] - ratios[r] for c, r in pairs])


@pytest.mark.parametrize(
    ("recipe", "pairs", "compared"),
    [
        # Of equal scores the first is best and the last worst; the row of 0.0 leads.
        pytest.param(BASE, [(1, 3), (6, 7)], [0, 1], marks=pytest.mark.slow),
        (BRADLEY_TERRY, [(1, 3), (6, 7)], [0, 1]),
        pytest.param(
            NEIGHBOURS,
            [(1, 0), (2, 3), (4, 5), (6, 7)],
            [0, 1, 3],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dataclasses.replace(NEIGHBOURS, kind="ipo"),
            [(1, 0), (2, 3), (4, 5), (6, 7)],
            [0, 1, 3],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_update_is_dpo_s_of_the_ranked_samples(recipe, pairs, compared):
    gaps = np.array([SCORES[c] - SCORES[r] for c, r in pairs], np.float64)
    smooth = np.zeros(len(pairs))
    if recipe.labels == "bradley_terry":
        smooth = 1 / (1 + np.exp(gaps))
    terms, slopes = oracles.dpo_pairs(leads(pairs), BETA, recipe.kind, smooth)
    after, stats = updated(recipe, scored())
    assert stats["loss/dpo"] == pytest.approx(np.mean([terms[i] for i in compared]))
    assert stats["pair/score_gap"] == pytest.approx(gaps.mean())
    assert stats["pair/tied_fraction"] == pytest.approx((gaps == 0).mean())
    expected = np.zeros(TABLE.shape)
    for i in compared:
        chosen, rejected = pairs[i]
        expected[chosen][MASK[chosen]] += slopes[i] / len(compared)
        expected[rejected][MASK[rejected]] -= slopes[i] / len(compared)
    np.testing.assert_allclose((TABLE - after) / RATE, expected, atol=1e-5)
    both = [row for i in range(len(pairs)) for row in pairs[i]]
    far = np.abs(np.float64(TABLE) - OLD)[both][MASK[both]]
    assert stats["policy/sampler_mismatch"] == pytest.approx(far.mean(), rel=1e-5)
    rollouts = scored()
    made = toys.jit(recipe.experience)
    experience, _ = made(rollouts, kl_coef=jnp.float32(BETA))
    assert experience.members.tolist() == [[*pair] for pair in pairs]
    np.testing.assert_array_equal(
        experience.laid_out(rollouts.rollout.tokens), experience.tokens
    )


@pytest.mark.slow
def test_parts_of_pairs_are_the_whole_and_update_is_a_step():
    whole, stats = updated(NEIGHBOURS, scored())
    parts, same = updated(NEIGHBOURS, scored(), rows=2)
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    assert same == pytest.approx(stats, rel=1e-5)
    experience, _ = NEIGHBOURS.experience(scored(), kl_coef=jnp.float32(BETA))
    train = state.grpo_state(
        policy=jnp.asarray(TABLE),
        policy_optimizer=NEIGHBOURS.policy_optimizer,
        kl=kl_control.fixed(BETA),
    )
    after, parts_stats = online_dpo.update(
        train, experience=experience, key=jax.random.key(0), recipe=NEIGHBOURS
    )
    np.testing.assert_allclose(after.policy, whole, atol=1e-6)
    means = masked.mean_stats(parts_stats)
    for name in ("loss/dpo", "dpo/margin", "policy/sampler_mismatch"):
        assert float(means[name]) == pytest.approx(stats[name], rel=1e-5)


@pytest.mark.slow
def test_a_controller_moves_the_coefficient_of_the_loss():
    experience, _ = NEIGHBOURS.experience(scored(), kl_coef=jnp.float32(BETA))
    kl = np.where(MASK, np.float64(OLD) - REF, 0).sum(axis=1).mean()  # per response
    target = 2 * kl
    controller = kl_control.Adaptive(
        target=target, unit="response", horizon=40, min_kl_coef=1e-3, max_kl_coef=9.0
    )
    margins = {}
    for coef in (BETA, 2 * BETA):
        train = state.grpo_state(
            policy=jnp.asarray(TABLE),
            policy_optimizer=NEIGHBOURS.policy_optimizer,
            kl=controller.controller(coef),
        )
        after, stats = online_dpo.update(
            train, experience=experience, key=jax.random.key(0), recipe=NEIGHBOURS
        )
        margins[coef] = float(masked.mean_stats(stats)["dpo/margin"])
        # Two responses to a pair: eight, as in the rollout.
        expected = oracles.adaptive_kl_coef(coef, kl, ROWS, target=target, horizon=40)
        assert float(after.kl.kl_coef) == pytest.approx(expected, rel=1e-5)
    assert margins[2 * BETA] == pytest.approx(2 * margins[BETA], rel=1e-5)


@pytest.mark.slow
def test_labels_of_bradley_and_terry_teach_ties_and_stand_still_at_the_optimum():
    """βh = r1 - r2: no gradient, whatever the pairs. Ranked labels go on."""
    ratios = np.where(MASK, np.float64(TABLE) - REF, 0).sum(axis=1)
    rollouts = scored((BETA * ratios).astype(np.float32))
    recipe = dataclasses.replace(NEIGHBOURS, labels="bradley_terry")
    still, _ = updated(recipe, rollouts)
    np.testing.assert_allclose(still, TABLE, atol=1e-6)
    moved, _ = updated(NEIGHBOURS, rollouts)
    assert np.abs(moved - TABLE).max() > 1e-3
    tied = scored(np.zeros(ROWS, np.float32))
    still, stats = updated(NEIGHBOURS, tied)
    np.testing.assert_array_equal(still, TABLE)
    assert stats["pair/tied_fraction"] == 1
    moved, _ = updated(recipe, tied)
    assert np.abs(moved - TABLE).max() > 1e-4


def test_a_score_that_is_not_finite_makes_no_pair():
    scores = SCORES.copy()
    scores[4] = np.inf
    after, stats = updated(NEIGHBOURS, scored(scores))
    np.testing.assert_array_equal(after[4:6], TABLE[4:6])
    assert np.isfinite(stats["loss/dpo"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a finite number above 0"),
        ({"group_size": 1}, "group_size"),
        ({"group_size": 3, "pairing": "neighbours"}, "an even number with pairing"),
        ({"pairing": "all"}, "pairing: expected one of"),
        ({"labels": "soft"}, "labels: expected one of"),
        ({"kind": "robust"}, "kind: expected one of"),
        ({"kind": "ipo", "labels": "bradley_terry"}, "'ranked' with kind 'ipo'"),
    ],
)
def test_recipes_that_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(BASE, **change)


def test_options_of_a_policy_gradient_s_own_loss_are_none_here():
    of_all = {field.name for field in dataclasses.fields(PolicyRecipe)}
    here = {field.name for field in dataclasses.fields(online_dpo.OnlineDPORecipe)}
    assert of_all - here == {
        *("penalty", "sampler_correction", "surrogate", "entropy_coef", "aggregation"),
        *("loss_scale_factor", "stop_approxkl", "max_ratio_mean", "off_policy_mask"),
        *("token_choice", "entropy_control", "balance_coef", "routing_replay"),
    }
    of_a_loss = {"max_ratio_mean": 3.0}
    with pytest.raises(TypeError, match="max_ratio_mean"):
        online_dpo.OnlineDPORecipe(**of_a_loss)


def test_the_defaults_are_two_samples_ranked():
    recipe = online_dpo.OnlineDPORecipe()
    assert (recipe.group_size, recipe.num_epochs, recipe.temperature) == (2, 1, 1.0)
    assert (recipe.pairing, recipe.labels) == ("best_worst", "ranked")
    assert recipe.kind == "sigmoid"


@pytest.mark.parametrize(
    ("pairing", "options", "message"),
    [
        ("best_worst", {}, None),  # 2 pairs of 8 responses
        ("best_worst", {"num_minibatches": 2, "micro_batch_size": 1}, None),
        (
            "best_worst",
            {"num_minibatches": 4},
            "the 2 pairs, of 8 responses, of a batch",
        ),
        ("best_worst", {"micro_batch_size": 4}, "the 2 pairs, of 8 .* of a minibatch"),
        ("neighbours", {"micro_batch_size": 4}, None),  # 4 pairs
        (
            "neighbours",
            {"micro_batch_size": 3},
            "the 4 pairs, .* of a minibatch",
        ),
    ],
)
def test_sizes_are_of_pairs(pairing, options, message):
    recipe = dataclasses.replace(BASE, pairing=pairing, **options)
    if message is None:
        recipe.check_batch(8)
        return
    with pytest.raises(InputError, match=message):
        recipe.check_batch(8)


def test_what_there_is_no_pair_of():
    with pytest.raises(InputError, match="expected a reference, as DPO is a loss of"):
        BASE.experience(scored(ref=None), kl_coef=jnp.float32(1))
    three = dataclasses.replace(BASE, group_size=3)
    with pytest.raises(InputError, match="group"):
        three.experience(scored(), kl_coef=jnp.float32(1))
