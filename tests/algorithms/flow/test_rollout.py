import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from rlhf_jax import batch
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.functional import checks


@pytest.fixture(
    scope="module",
    params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)],
)
def model(request):
    return toys.FAMILIES[request.param]


@pytest.fixture(scope="module")
def params(model):
    return toys.params(model)


@pytest.fixture(scope="module")
def sampled(params, model):
    return toys.sampled(params, model=model)


def test_the_shape_of_a_rollout(sampled):
    """Prompts keep their columns; a response ends with its first stop token."""
    prompts = toys.prompts()
    tokens, mask, response = (
        np.asarray(a) for a in (sampled.tokens, sampled.mask, sampled.response_mask)
    )
    np.testing.assert_array_equal(tokens[:, :4], prompts.tokens)
    np.testing.assert_array_equal(mask[:, :4], prompts.mask)
    assert not response[:, :4].any()
    np.testing.assert_array_equal(mask[:, 4:], response[:, 4:])
    for b in range(4):
        stops = np.flatnonzero(np.isin(tokens[b, 4:], toys.STOP) & response[b, 4:])
        length = stops[0] + 1 if stops.size else toys.SIZE
        np.testing.assert_array_equal(response[b, 4:], np.arange(toys.SIZE) < length)
    np.testing.assert_array_equal(sampled.index, prompts.index)
    np.testing.assert_array_equal(sampled.sample, prompts.sample)


def test_old_logprobs_and_entropy_are_of_what_was_drawn_from(sampled, params, model):
    logits = toys.logits(params, model=model, tokens=sampled.tokens, mask=sampled.mask)
    response = np.asarray(sampled.response_mask)
    logits, tokens = np.asarray(logits, np.float64), np.asarray(sampled.tokens)
    expected = oracles.token_logprobs(logits, tokens, temperature=0.7)
    np.testing.assert_allclose(
        sampled.old_logprobs, np.where(response, expected, 0.0), atol=1e-5
    )
    entropy = np.roll(oracles.entropy(logits, temperature=0.7), 1, axis=1)
    np.testing.assert_allclose(
        sampled.entropy, np.where(response, entropy, 0.0), atol=1e-5
    )


def test_recomputed_logprobs_are_the_trainers_logprobs(sampled, params, model):
    wrong = dataclasses.replace(sampled, old_logprobs=sampled.old_logprobs - 1.0)
    recomputed = rollout.recompute_logprobs(
        wrong, params, model=model, max_new_tokens=toys.SIZE, temperature=0.7
    )
    np.testing.assert_allclose(recomputed.old_logprobs, sampled.old_logprobs, atol=1e-5)
    # What the sampler said stays beside them, however often they are recomputed.
    np.testing.assert_array_equal(recomputed.sampler_logprobs, wrong.old_logprobs)
    again = rollout.recompute_logprobs(
        recomputed, params, model=model, max_new_tokens=toys.SIZE, temperature=0.7
    )
    assert toys.leaves_equal(again, recomputed)
    other = dataclasses.replace(
        recomputed, old_logprobs=wrong.old_logprobs, sampler_logprobs=None
    )
    assert toys.leaves_equal(other, wrong)


def test_two_samples_of_one_number_are_refused(params, model):
    """They would have the same key and so the same response."""
    prompts = toys.prompts()
    prompts = dataclasses.replace(prompts, index=prompts.index.at[2].set(1))
    with pytest.raises(checks.InputError, match=r"sample: .* got 0 twice .* index 1,"):
        rollout.rollout(
            params,
            model=model,
            prompts=prompts,
            key=jax.random.key(0),
            max_new_tokens=2,
            stop_ids=(),
            temperature=1.0,
        )


def test_truncate_ends_a_response_after_its_first_stop():
    response = np.array([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    response_mask = jnp.asarray(response, bool)
    long = batch.Rollout(
        tokens=jnp.asarray(
            # A stop token in the prompt ends nothing.
            [[1, 5, 6, 2, 7, 1], [3, 4, 5, 6, 7, 8], [3, 4, 1, 1, 1, 1]],
            jnp.int32,
        ),
        mask=jnp.ones((3, 6), bool),
        response_mask=response_mask,
        old_logprobs=jnp.where(response_mask, -1.5, 0.0),
        entropy=jnp.where(response_mask, 2.5, 0.0),
        index=jnp.arange(3),
        sample=jnp.zeros(3, jnp.int32),
        sampler_logprobs=jnp.where(response_mask, -3.5, 0.0),
        version=jnp.where(response_mask, 7, 0),
    )
    short = rollout.truncate(long, stop_ids=toys.STOP)
    expected = np.array([[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(short.response_mask, expected)
    np.testing.assert_array_equal(short.mask, expected | [1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(short.old_logprobs, expected * -1.5)
    np.testing.assert_array_equal(short.entropy, expected * 2.5)
    np.testing.assert_array_equal(short.sampler_logprobs, expected * -3.5)
    np.testing.assert_array_equal(short.version, expected * 7)
    assert toys.leaves_equal(rollout.truncate(long, stop_ids=()), long)


def test_fixed_length_then_truncated_is_stopping(params, model, sampled):
    """Every position has its own key, so tokens before the stop do not change."""
    long = toys.sample(
        params,
        model=model,
        prompts=toys.prompts(),
        key=jax.random.key(5),
        max_new_tokens=toys.SIZE,
        stop_ids=(),
        temperature=0.7,
    )
    assert np.asarray(long.response_mask)[:, 4:].all()
    short = rollout.truncate(long, stop_ids=toys.STOP)
    np.testing.assert_array_equal(short.response_mask, sampled.response_mask)
    mask = np.asarray(sampled.mask)
    np.testing.assert_array_equal(
        np.where(mask, short.tokens, 0), np.where(mask, sampled.tokens, 0)
    )
    np.testing.assert_allclose(short.old_logprobs, sampled.old_logprobs, atol=1e-6)


def test_a_temperature_that_cannot_be(params, model):
    with pytest.raises(checks.InputError, match=r"temperature: .* above 0, got 0"):
        toys.sampled(params, model=model, temperature=0.0)
