"""Weights of tokens that a rounded policy drew."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax.algorithms import batch, grpo, reinforce, state
from rlhf_jax.algorithms.policy_gradient.sampler_mismatch import weighted
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.control import fixed

CAP = 1.5


def test_advantages_are_multiplied_by_capped_ratios():
    rng = np.random.default_rng(0)
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
    output, stats = weighted(experience, sampler_logprobs=toys.array(sampler), cap=CAP)
    weights = np.ones(mask.shape)
    weights[mask] = np.minimum(np.exp((trainer - sampler)[mask]), CAP)
    expected = np.where(mask, weights * advantages, 0)
    np.testing.assert_allclose(output.advantages, expected, rtol=1e-5, atol=1e-6)
    means = masked.mean_stats(stats)
    mean, capped = weights[mask].mean(), (weights[mask] == CAP).mean()
    np.testing.assert_allclose(means["policy/sampler_weight"], mean, rtol=1e-5)
    np.testing.assert_allclose(means["policy/sampler_weight_capped"], capped, rtol=1e-5)
    assert 0 < capped < 1


@pytest.mark.slow
def test_an_iteration_weights_by_the_sampler_that_was_there():
    recipe = grpo.GRPO(
        model=toys.GPT2,
        policy_optimizer=optax.sgd(0.1),
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        group_size=2,
        temperature=0.7,
        recompute_logprobs=True,
    )
    rollout = toys.sampled(toys.params(), lengths=(4, 4, 2, 2))
    rollout = dataclasses.replace(rollout, index=jnp.asarray([0, 0, 1, 1], jnp.int32))
    low = dataclasses.replace(rollout, old_logprobs=rollout.old_logprobs - 0.25)

    def experience(rollout, **changed):
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
            reference=None,
            recipe=dataclasses.replace(recipe, **changed),
        )
        return made, masked.mean_stats(stats)

    plain, _ = experience(low)
    made, stats = experience(low, sampler_weight_cap=2.0)
    np.testing.assert_allclose(
        made.advantages, np.exp(0.25) * plain.advantages, rtol=1e-4
    )
    np.testing.assert_allclose(stats["policy/sampler_weight"], np.exp(0.25), rtol=1e-4)
    np.testing.assert_allclose(stats["policy/sampler_mismatch"], 0.25, rtol=1e-4)
    capped, stats = experience(low, sampler_weight_cap=1.0)
    np.testing.assert_array_equal(capped.advantages, plain.advantages)
    assert stats["policy/sampler_weight_capped"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler_weight_cap": 2.0}, "expected recompute_logprobs with it, got 2.0"),
        (
            {"sampler_weight_cap": 0.5, "recompute_logprobs": True},
            "expected a finite number of at least 1, got 0.5",
        ),
    ],
)
def test_caps_that_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        reinforce.ReinforceRecipe(**options)
