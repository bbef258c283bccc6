"""Importance weights of tokens from a sampler with rounded parameters."""

import dataclasses
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax.algorithms import batch, grpo, state
from rlhf_jax.algorithms.policy_gradient import loss
from rlhf_jax.algorithms.policy_gradient.corrections import (
    Mask,
    Recompute,
    Reject,
    Truncate,
    corrected,
    staleness,
    weighted,
)
from rlhf_jax.functional import masked
from rlhf_jax.functional.aggregation import prompt_scale
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.control import fixed
from rlhf_jax.functional.kl.penalty import UNBIASED_K3
from rlhf_jax.functional.off_policy.importance import Correction
from rlhf_jax.roles.reference.frozen import NO_MODELS

CAP = 1.5
REJECT = Reject(1.3, floor=0.8, level="geometric")


def drawn(seed=0):
    """An experience of four responses, and the sampler's log-probs."""
    rng = np.random.default_rng(seed)
    trainer, sampler, advantages = rng.normal(0, 1, (3, 4, 6))
    mask = rng.random((4, 6)) < 0.7
    sampler[~mask] = np.inf  # what stands there is not read
    numbers = {
        "old_logprobs": toys.array(trainer),
        "ref_logprobs": None,
        "token_rewards": toys.array(advantages),
        "advantages": toys.array(np.where(mask, advantages, 0)),
    }
    experience = batch.PolicyExperience(
        tokens=toys.array(np.zeros(mask.shape), np.int32),
        mask=toys.array(mask, bool),
        response_mask=toys.array(mask, bool),
        **numbers,
    )
    return experience, toys.array(sampler)


def test_advantages_are_multiplied_by_capped_ratios():
    experience, sampler = drawn()
    mask = np.asarray(experience.response_mask)
    ratio = np.exp(np.where(mask, experience.old_logprobs - sampler, 0.0))
    output, stats = weighted(experience, Truncate(CAP), sampler_logprobs=sampler)
    weights = np.minimum(ratio, CAP)
    expected = np.where(mask, weights * experience.advantages, 0)
    np.testing.assert_allclose(output.advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(output.response_mask, mask)
    np.testing.assert_array_equal(output.behaviour_logprobs, sampler)
    np.testing.assert_array_equal(
        experience.behaviour_logprobs, experience.old_logprobs
    )
    means = masked.mean_stats(stats)
    mean, capped = weights[mask].mean(), (weights[mask] == CAP).mean()
    np.testing.assert_allclose(means["policy/sampler_weight"], mean, rtol=1e-5)
    np.testing.assert_allclose(means["policy/sampler_weight_capped"], capped, rtol=1e-5)
    kl = -np.log(ratio[mask]).mean()
    np.testing.assert_allclose(means["policy/sampler_kl"], kl, rtol=1e-5)
    assert 0 < capped < 1
    assert 0 < means["policy/sampler_ess"] < 1


@pytest.mark.slow
def test_a_rejected_response_is_left_out_of_everything_and_scales_follow():
    experience, sampler = drawn(5)
    scale = prompt_scale(experience.response_mask, group_size=2)
    experience = dataclasses.replace(experience, prompt_scale=scale)
    output, stats = weighted(experience, REJECT, sampler_logprobs=sampler, group_size=2)
    mask = np.asarray(experience.response_mask)
    gap = np.where(mask, experience.old_logprobs - sampler, 0.0)
    mean = gap.sum(axis=1) / mask.sum(axis=1)
    accepted = (mean <= np.log(1.3)) & (mean >= np.log(0.8))
    assert accepted.any()
    assert (mean > np.log(1.3)).any()
    assert (mean < np.log(0.8)).any()
    np.testing.assert_array_equal(output.response_mask, mask & accepted[:, None])
    np.testing.assert_array_equal(
        output.advantages, np.where(accepted[:, None], experience.advantages, 0.0)
    )
    np.testing.assert_array_equal(
        output.prompt_scale, prompt_scale(output.response_mask, group_size=2)
    )
    means = masked.mean_stats(stats)
    np.testing.assert_allclose(means["policy/sampler_ess"], accepted.mean())


@pytest.mark.parametrize("correction", get_args(Correction))
def test_of_the_trainer_s_own_tokens_nothing_changes(correction):
    """Nothing changes, to the bit, even at the tightest bounds."""
    experience, _ = drawn()
    own = experience.old_logprobs
    level, kind = correction.split("_")
    bounds = {"cap": 1.0} if kind == "truncate" else {"cap": 1.0, "floor": 1.0}
    how = {"truncate": Truncate, "mask": Mask, "reject": Reject}[kind]
    output, stats = weighted(
        experience, how(level=level, **bounds), sampler_logprobs=own
    )
    expected = dataclasses.replace(experience, sampler_logprobs=own)
    assert toys.leaves_equal(output, expected)
    means = masked.mean_stats(stats)
    assert means["policy/sampler_weight"] == means["policy/sampler_ess"] == 1
    assert means["policy/sampler_kl"] == means["policy/sampler_kl_k3"] == 0


RECIPE = grpo.GRPO(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=6,
    stop_ids=toys.STOP,
    group_size=2,
    penalty=UNBIASED_K3,
    sampler_correction=Recompute(),
)


def test_the_recipe_says_how_an_experience_is_corrected():
    experience, sampler = drawn(5)
    scale = prompt_scale(experience.response_mask, group_size=2)
    experience = dataclasses.replace(experience, prompt_scale=scale)
    rollout = SimpleNamespace(
        behaviour_logprobs=sampler,
        version=jnp.zeros(sampler.shape, jnp.int32),
        response_mask=experience.response_mask,
    )
    at = {"rollout": rollout, "step": jnp.int32(2)}
    # Of the tokens that are trained on, whatever else the rollout has.
    same, stats = corrected(experience, **at, recipe=RECIPE)
    assert same is experience
    trained = np.asarray(experience.response_mask)
    apart = np.abs(np.asarray(experience.old_logprobs - sampler))[trained]
    assert float(masked.mean_stats(stats)["policy/sampler_mismatch"]) == pytest.approx(
        apart.mean(), rel=1e-5
    )
    assert not RECIPE.leaves_out
    recipe = dataclasses.replace(RECIPE, sampler_correction=REJECT)
    output, stats = corrected(experience, **at, recipe=recipe)
    expected, _ = weighted(experience, REJECT, sampler_logprobs=sampler, group_size=2)
    assert toys.leaves_equal(output, expected)
    assert masked.mean_stats(stats)["policy/staleness"] == 2
    assert recipe.leaves_out  # whose KL per response is over those that are left


def test_the_age_of_tokens_is_in_iterations():
    rollout = SimpleNamespace(
        version=jnp.array([[0, 2, 3], [0, 5, 0]], jnp.int32),
        response_mask=jnp.array([[False, True, True], [False, True, False]]),
    )
    means = masked.mean_stats(staleness(rollout, step=jnp.int32(5)))
    np.testing.assert_allclose(means["policy/staleness"], 5 / 3, rtol=1e-6)
    assert staleness(SimpleNamespace(version=None), step=jnp.int32(5)) == {}


@pytest.mark.slow
def test_weights_of_a_kl_in_the_loss_are_over_the_sampler(monkeypatch):
    """The unbiased k3, from made-up log-probs."""
    experience, sampler = drawn()
    mask = np.asarray(experience.response_mask)
    ref = toys.array(np.where(mask, experience.old_logprobs + 0.3, 0.0))
    now = toys.array(np.where(mask, experience.old_logprobs - 0.1, 0.0))
    texts = SimpleNamespace(
        tokens=experience.tokens,
        mask=experience.mask,
        first_column=0,
        hidden_states=lambda *_, **__: None,
        padded=lambda x: x,
    )
    monkeypatch.setattr(loss, "texts_of", lambda *_, **__: texts)
    monkeypatch.setattr(loss, "logprobs_from_hidden", lambda *_, **__: (now, None))

    def value(**changed):
        _, stats, *_ = loss.policy_terms(
            {},
            experience=dataclasses.replace(experience, ref_logprobs=ref, **changed),
            kl_coef=0.1,
            num_tokens=jnp.float32(mask.sum()),
            num_responses=jnp.float32(4),
            recipe=RECIPE,
        )
        return float(masked.mean_stats(stats)["loss/kl"])

    k3 = oracles.k3(np.asarray(now), np.asarray(ref))
    for drawn_by, changed in (
        (sampler, {"sampler_logprobs": sampler}),
        (experience.old_logprobs, {}),
    ):
        weighted_k3 = np.where(mask, np.exp(np.where(mask, now - drawn_by, 0)) * k3, 0)
        expected = weighted_k3.sum() / mask.sum()
        assert value(**changed) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_an_iteration_weights_by_the_sampler_that_was_there():
    recipe = grpo.GRPO(
        model=toys.GPT2,
        policy_optimizer=optax.sgd(0.1),
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        group_size=2,
        temperature=0.7,
        sampler_correction=Recompute(),
    )
    rollout = toys.sampled(toys.params(), lengths=(4, 4, 2, 2))
    rollout = dataclasses.replace(rollout, index=jnp.asarray([0, 0, 1, 1], jnp.int32))
    low = dataclasses.replace(rollout, old_logprobs=rollout.old_logprobs - 0.25)

    def experience(rollout, correction=recipe.sampler_correction):
        start = state.grpo_state(
            policy=toys.params(),
            policy_optimizer=recipe.policy_optimizer,
            kl=fixed(0.0),
        )
        make = jax.jit(grpo.make_experience, static_argnames=("recipe",))
        _, made, stats, _ = make(
            start,
            rollout=rollout,
            scores=jnp.asarray([1.0, 2.0, 3.0, 6.0], jnp.float32),
            frozen=NO_MODELS,
            recipe=dataclasses.replace(recipe, sampler_correction=correction),
        )
        return made, masked.mean_stats(stats)

    plain, _ = experience(low)
    made, stats = experience(low, Truncate(2.0))
    np.testing.assert_allclose(
        made.advantages, np.exp(0.25) * plain.advantages, rtol=1e-4
    )
    np.testing.assert_allclose(stats["policy/sampler_weight"], np.exp(0.25), rtol=1e-4)
    np.testing.assert_allclose(stats["policy/sampler_mismatch"], 0.25, rtol=1e-4)
    capped, stats = experience(low, Truncate(1.0))
    np.testing.assert_array_equal(capped.advantages, plain.advantages)
    assert stats["policy/sampler_weight_capped"] == 1
    # Of whole responses, of an older version, told by a sampler that is not asked.
    lengths = np.asarray(low.response_mask).sum(axis=1, keepdims=True)
    old = dataclasses.replace(
        rollout,
        sampler_logprobs=low.old_logprobs,
        version=jnp.where(low.response_mask, -3, 0),
    )
    made, stats = experience(old, Truncate(9.0, level="sequence"))
    np.testing.assert_allclose(
        made.advantages, np.exp(0.25 * lengths) * plain.advantages, rtol=1e-4
    )
    assert stats["policy/staleness"] == 3
    made, stats = experience(old, Reject(2.0, floor=0.5))
    accepted = (0.25 * lengths <= np.log(2)) & np.asarray(low.response_mask)
    np.testing.assert_array_equal(made.response_mask, accepted)
    assert 0 < accepted.sum() < np.asarray(low.response_mask).sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Truncate(0.5), "cap: expected a number of at least 1, got 0.5"),
        (lambda: Mask(5.0, floor=2.0), "floor: expected a number above 0 and of at"),
        (lambda: Mask(5.0, level="geometric"), "level: expected one of 'token', 'seq"),
        (lambda: Reject(5.0, level="token"), "level: expected one of 'sequence', 'geo"),
    ],
)
def test_corrections_that_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_each_correction_has_a_formula():
    of_tokens = {"token": (Truncate, Mask), "sequence": (Truncate, Mask, Reject)}
    levels = of_tokens | {"geometric": (Reject,)}
    made = [kind(2.0, level=each) for each, kinds in levels.items() for kind in kinds]
    assert {each.correction for each in made} == {*get_args(Correction)}


@pytest.mark.slow
def test_a_response_of_each_prompt_is_a_group_of_its_own():
    experience, sampler = drawn(5)
    three = jax.tree.map(lambda x: x[:3], experience)
    scale = prompt_scale(three.response_mask, group_size=1)
    output, _ = weighted(
        dataclasses.replace(three, prompt_scale=scale),
        REJECT,
        sampler_logprobs=sampler[:3],
    )
    np.testing.assert_array_equal(
        output.prompt_scale, prompt_scale(output.response_mask, group_size=1)
    )
