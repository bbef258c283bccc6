import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from rlhf_jax import decoder, frozen, kl, policy
from rlhf_jax.models.packing import texts_of

LENGTHS, SIZE = (6, 4, 1, 5), 6
logits_of = jax.jit(policy.logits, static_argnames="model")
both = jax.jit(
    policy.logprobs_and_entropy,
    static_argnames=("model", "first_column"),
)
for_each_family = pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)


@pytest.mark.cases(quick=2)
@for_each_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_logprobs_and_entropy_are_those_of_the_logits(model, side):
    params = tiny.params(model)
    tokens, mask = tiny.batch(LENGTHS, SIZE, side=side)
    logits = np.asarray(logits_of(params, model=model, tokens=tokens, mask=mask))
    logprobs, entropy = both(
        params, model=model, tokens=tokens, mask=mask, temperature=0.7
    )
    expected = oracles.token_logprobs(logits, tokens, 0.7)
    expected_entropy = oracles.entropy(logits, 0.7)
    for row, t in np.ndindex(*tokens.shape):
        if t > 0 and mask[row, t] and mask[row, t - 1]:
            assert float(logprobs[row, t]) == pytest.approx(expected[row, t], abs=1e-5)
            assert float(entropy[row, t]) == pytest.approx(
                expected_entropy[row, t - 1], abs=1e-5
            )
        else:  # padding, or the first token of a text
            assert float(logprobs[row, t]) == float(entropy[row, t]) == 0


def test_columns_before_the_first_are_not_computed():
    model = tiny.GPT2
    tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
    options = {"model": model, "tokens": tokens, "mask": mask, "temperature": 0.7}
    whole = both(tiny.params(model), **options)
    part = both(tiny.params(model), first_column=4, **options)
    for everything, response in zip(whole, part, strict=True):
        np.testing.assert_allclose(response[:, 4:], everything[:, 4:], atol=1e-6)
        assert not np.asarray(response[:, :4]).any()


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_the_kl_of_a_policy_to_itself_is_0_at_every_temperature(temperature):
    model = tiny.GPT2
    params = tiny.params(model)
    tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
    compute = functools.partial(
        both,
        model=model,
        tokens=tokens,
        mask=mask,
        temperature=temperature,
    )
    ours, _ = compute(params)
    theirs, _ = compute(frozen.read(frozen.freeze(params)))
    assert np.asarray(ours).any()
    for estimator in (kl.k1, kl.k2, kl.k3):
        np.testing.assert_array_equal(estimator(ours, theirs), 0.0)
    elsewhere, _ = compute(tiny.params(model, seed=1))
    assert float(jnp.abs(kl.k1(ours, elsewhere)).max()) > 0.1


def test_logits_show_the_true_vocabulary_alone():
    for model in tiny.BOTH:
        assert model.padded_vocab_size == 128
        tokens, mask = tiny.batch(LENGTHS, SIZE, side="left")
        shape = jax.eval_shape(
            lambda params, m=model, t=tokens, k=mask: policy.logits(
                params, model=m, tokens=t, mask=k
            ),
            tiny.params(model),
        )
        assert shape.shape == (4, SIZE, tiny.VOCAB)


UNUSED = ((0, 1), (4, 6), (11, 13))
USED = [1, 2, 3, 6, 7, 8, 9, 10]


def of_used(size):
    tokens, mask = tiny.batch(LENGTHS, size, side="left")
    return np.where(mask, np.array(USED)[tokens % len(USED)], 0).astype(np.int32), mask


@pytest.mark.slow
@for_each_family
def test_ids_without_a_token_have_probability_0_in_every_role(model):
    """The logits ensure it; KL(π ‖ π) is 0, and every KL is over the used ids."""
    model = dataclasses.replace(model, unused_ids=UNUSED)
    params, other = tiny.params(model), tiny.params(model, seed=1)
    tokens, mask = of_used(SIZE)
    inputs = {"model": model, "tokens": tokens, "mask": mask}
    every = np.asarray(logits_of(params, **inputs))
    assert np.all(np.isneginf(np.delete(every, USED, axis=-1)))
    logits, ref_logits = (
        np.asarray(logits_of(weights, **inputs))[..., USED]
        for weights in (params, other)
    )
    places = np.searchsorted(USED, tokens).clip(0, len(USED) - 1)
    ours, entropy = both(params, temperature=0.7, **inputs)
    predicted = mask & np.pad(mask[:, :-1], ((0, 0), (1, 0)))
    expected = np.where(predicted, oracles.token_logprobs(logits, places, 0.7), 0)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    after = np.pad(oracles.entropy(logits, 0.7)[:, :-1], ((0, 0), (1, 0)))
    np.testing.assert_allclose(entropy, np.where(predicted, after, 0), atol=1e-5)
    theirs, _ = both(frozen.read(frozen.freeze(params)), temperature=0.7, **inputs)
    np.testing.assert_array_equal(kl.k1(ours, theirs), 0.0)

    def exact(params, ref_params, **options):
        hidden, ref_hidden = (
            decoder.hidden_states(weights, **inputs) for weights in (params, ref_params)
        )
        sides = params, hidden, ref_params, ref_hidden
        texts = texts_of(inputs["tokens"], inputs["mask"])
        return policy.exact_kl(
            *sides, texts=texts, model=model, temperature=0.7, **options
        )

    np.testing.assert_allclose(exact(params, params), 0, atol=1e-6)
    divergence = oracles.exact_kl(logits, ref_logits, 0.7)[:, :-1]
    divergence = np.where(predicted, np.pad(divergence, ((0, 0), (1, 0))), 0)
    for options in ({}, {"top_k": 10}):
        np.testing.assert_allclose(
            exact(params, other, **options), divergence, rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_no_gradient_reaches_rows_of_ids_without_a_token(tied):
    model = dataclasses.replace(tiny.GPT2, unused_ids=UNUSED, tied_head=tied)
    tokens, mask = of_used(SIZE)
    mask[:, -1], tokens[:, -1] = True, 7

    def loss(params):
        logprobs, entropy = policy.logprobs_and_entropy(
            params, model=model, tokens=tokens, mask=mask
        )
        return jnp.sum(logprobs) + jnp.sum(entropy)

    gradient = jax.jit(jax.grad(loss))(tiny.params(model))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    head = gradient["embed"]["tokens"] if tied else gradient["head"]["kernel"]
    absent = np.delete(np.arange(model.padded_vocab_size), USED)
    assert not np.any(np.asarray(head)[absent[1:]])  # id 0 is read at padding
    assert np.all(np.any(np.asarray(head)[USED], axis=-1))
