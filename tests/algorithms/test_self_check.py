import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from rlhf_jax import decoder
from rlhf_jax.algorithms import flow, self_check

TOLERANCE = self_check.TOLERANCE["float32"]
SAMPLER = "the trainer's log-probs to equal those kept while sampling"
REFERENCE = r"the policy's log-probs to equal the reference's \(KL must start at 0\)"


@pytest.fixture(
    scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)]
)
def model(request):
    return toys.FAMILIES[request.param]


@pytest.fixture(scope="module")
def params(model):
    return toys.params(model)


@pytest.fixture(scope="module")
def reference(params):
    return toys.freeze(params)


@pytest.fixture(scope="module")
def rollout(params, model):
    return toys.sampled(params, model=model)


@pytest.fixture(scope="module")
def measure(model):
    """Runs the check as an experiment does."""
    return toys.jit(
        functools.partial(
            self_check.measure,
            model=model,
            max_new_tokens=toys.SIZE,
            temperature=0.7,
        )
    )


@pytest.fixture(scope="module")
def clean(measure, params, rollout, reference):
    return measure(params, rollout=rollout, reference=reference)


def test_a_clean_rollout_passes(clean):
    assert bool(clean.starts_equal)
    self_check.require(clean, tolerance=TOLERANCE)
    self_check.require(clean, tolerance=TOLERANCE, expect_equal=True)


@pytest.mark.slow
def test_without_a_reference_only_the_sampler_is_checked(measure, params, rollout):
    measured = measure(params, rollout=rollout, reference=None)
    assert measured.reference is None
    self_check.require(measured, tolerance=TOLERANCE)


def test_who_drew_the_tokens_is_checked_where_log_probs_were_recomputed(
    rollout, model, monkeypatch
):
    monkeypatch.setattr(flow.rollout, "logprobs", lambda *_, **__: rollout.old_logprobs)
    drawn = rollout.old_logprobs - 1.0
    both = dataclasses.replace(rollout, sampler_logprobs=drawn)
    measured = self_check.measure(
        {},
        rollout=both,
        reference=None,
        model=model,
        max_new_tokens=toys.SIZE,
        temperature=0.7,
    )
    np.testing.assert_array_equal(measured.sampler, drawn)
    with pytest.raises(self_check.SelfCheckError, match=SAMPLER):
        self_check.require(measured, tolerance=TOLERANCE)


def test_wrong_temperature(params, rollout, model):
    warmer = toys.jit(
        functools.partial(
            self_check.measure, model=model, max_new_tokens=toys.SIZE, temperature=1.0
        )
    )(params, rollout=rollout, reference=None)
    with pytest.raises(self_check.SelfCheckError, match=SAMPLER) as error:
        self_check.require(warmer, tolerance=TOLERANCE)
    assert "one temperature" in str(error.value)
    assert "Nothing was updated" in str(error.value)


def test_shifted_column(clean):
    shifted = dataclasses.replace(clean, sampler=np.roll(clean.sampler, 1, axis=1))
    with pytest.raises(self_check.SelfCheckError, match=SAMPLER):
        self_check.require(shifted, tolerance=TOLERANCE)


def test_attended_padding(measure, params, rollout):
    ones = dataclasses.replace(rollout, mask=jnp.ones_like(rollout.mask))
    measured = measure(params, rollout=ones, reference=None)
    with pytest.raises(self_check.SelfCheckError, match=SAMPLER):
        self_check.require(measured, tolerance=TOLERANCE)


@pytest.mark.slow
def test_positions_that_count_padding(monkeypatch, params, model):
    """The fault is in every full forward pass, including the sampler's prefill."""

    def columns(mask, **of_texts):
        count = jnp.arange(mask.shape[1], dtype=jnp.int32)
        return jnp.broadcast_to(count[None, :], mask.shape)

    monkeypatch.setattr(decoder, "positions_of", columns)
    sample = functools.partial(toys.sample.__wrapped__, model=model)
    faulty = toys.jit(
        lambda params: sample(
            params,
            prompts=toys.prompts(),
            key=jax.random.key(5),
            max_new_tokens=toys.SIZE,
            stop_ids=toys.STOP,
            temperature=0.7,
        )
    )(params)
    measured = toys.jit(
        lambda params, rollout: self_check.measure(
            params,
            rollout=rollout,
            reference=None,
            model=model,
            max_new_tokens=toys.SIZE,
            temperature=0.7,
        )
    )(params, faulty)
    with pytest.raises(self_check.SelfCheckError, match=SAMPLER):
        self_check.require(measured, tolerance=TOLERANCE)


def test_swapped_reference(measure, params, rollout, reference, model):
    """The fingerprint is the policy's, but the parameters that are read are others."""
    other = toys.params(model, seed=4)
    swapped = dataclasses.replace(reference, stored=other)
    measured = measure(params, rollout=rollout, reference=swapped)
    with pytest.raises(self_check.SelfCheckError, match=REFERENCE):
        self_check.require(measured, tolerance=TOLERANCE)


def test_a_policy_that_starts_elsewhere(measure, params, rollout, model):
    """This is allowed, unless the caller requires that it starts as the reference."""
    other = toys.freeze(toys.params(model, seed=4))
    measured = measure(params, rollout=rollout, reference=other)
    assert not bool(measured.starts_equal)
    self_check.require(measured, tolerance=TOLERANCE)
    with pytest.raises(self_check.SelfCheckError, match=REFERENCE):
        self_check.require(measured, tolerance=TOLERANCE, expect_equal=True)


# The comparison itself, on numbers.

MASK = np.array([[0, 1, 1, 1], [0, 1, 0, 0]] * 50, bool)


def measured(**changes) -> self_check.Measured:
    zeros = np.zeros(MASK.shape, np.float32)
    start = {"trainer": zeros, "sampler": zeros, "reference": zeros}
    return self_check.Measured(**(start | changes), mask=MASK, starts_equal=True)


def test_the_message_says_by_how_much_and_where():
    sampler = np.zeros(MASK.shape, np.float32)
    sampler[6, 1:] = [0.0, 0.5, 0.1]
    with pytest.raises(self_check.SelfCheckError) as error:
        self_check.require(measured(sampler=sampler), tolerance=1e-4)
    assert "difference of 0.2 over the 3 tokens of row 6" in str(error.value)
    assert "most at column 2: 0.00000 against 0.50000" in str(error.value)


def test_a_reference_in_fewer_bits_has_a_tolerance_of_its_own():
    rounded = measured(reference=np.full(MASK.shape, 0.01, np.float32))
    with pytest.raises(self_check.SelfCheckError, match=REFERENCE):
        self_check.require(rounded, tolerance=1e-3)
    self_check.require(rounded, tolerance=1e-3, storage_tolerance=0.02)


def test_a_fault_of_one_row_in_a_hundred_is_seen():
    sampler = np.zeros(MASK.shape, np.float32)
    sampler[3, 1] = 0.002  # a hundredth of the tolerance as a mean over the batch
    with pytest.raises(self_check.SelfCheckError, match="row 3"):
        self_check.require(measured(sampler=sampler), tolerance=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["trainer", "sampler", "reference"])
def test_a_number_that_is_not_finite_stops(which, bad):
    array = np.zeros(MASK.shape, np.float32)
    array[4, 2] = bad
    with pytest.raises(self_check.SelfCheckError, match="row 4; most at column 2"):
        self_check.require(measured(**{which: array}), tolerance=1e-4)


def test_what_stands_outside_the_response_is_not_compared():
    array = np.where(MASK, 0.0, np.nan).astype(np.float32)
    self_check.require(measured(sampler=array), tolerance=0.0)


def test_one_leaf_that_differs_is_not_an_equal_start(
    monkeypatch, params, rollout, model
):
    """Digests are compared; no model is run."""
    zeros = jnp.zeros(rollout.tokens.shape, jnp.float32)
    first_columns = []

    def logprobs(params, *, first_column, **options):
        first_columns.append(first_column)
        return zeros

    monkeypatch.setattr(flow.rollout, "logprobs", logprobs)
    leaves, tree = jax.tree.flatten(params)
    moved = jax.tree.unflatten(tree, [leaves[0] + 1, *leaves[1:]])
    for reference, equal in ((params, True), (moved, False)):
        output = self_check.measure(
            params,
            rollout=rollout,
            reference=toys.freeze(reference),
            model=model,
            max_new_tokens=toys.SIZE,
            temperature=0.7,
        )
        assert bool(output.starts_equal) == equal
    # A head reads the columns of the response alone.
    assert first_columns == [rollout.tokens.shape[1] - toys.SIZE] * 4
