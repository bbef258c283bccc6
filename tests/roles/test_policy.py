import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from rlhf_jax import frozen, kl, policy

LENGTHS, SIZE = (6, 4, 1, 5), 6
logits_of = jax.jit(policy.logits, static_argnames="model")
both = jax.jit(
    policy.logprobs_and_entropy,
    static_argnames=("model", "first_column"),
)
each_family = pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)


@each_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_logprobs_and_entropy_are_those_of_the_logits(model, side):
    params = tiny.params(model)
    tokens, mask = tiny.batch(LENGTHS, SIZE, side=side)
    logits = np.asarray(logits_of(params, model=model, tokens=tokens, mask=mask))
    found, entropy = both(
        params, model=model, tokens=tokens, mask=mask, temperature=0.7
    )
    expected = oracles.token_logprobs(logits, tokens, 0.7)
    expected_entropy = oracles.entropy(logits, 0.7)
    for row, t in np.ndindex(*tokens.shape):
        if t > 0 and mask[row, t] and mask[row, t - 1]:
            assert float(found[row, t]) == pytest.approx(expected[row, t], abs=1e-5)
            assert float(entropy[row, t]) == pytest.approx(
                expected_entropy[row, t - 1], abs=1e-5
            )
        else:  # padding, or the first token of a text
            assert float(found[row, t]) == float(entropy[row, t]) == 0


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
