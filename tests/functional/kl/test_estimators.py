import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import kl

pytestmark = pytest.mark.usefixtures("strict_dtypes")

RNG = np.random.default_rng(0)
LOGPROBS = -RNG.exponential(2.0, (3, 5)).astype(np.float32)
REF_LOGPROBS = -RNG.exponential(2.0, (3, 5)).astype(np.float32)
LOGITS = RNG.normal(0, 2, (2, 3, 7)).astype(np.float32)
REF_LOGITS = RNG.normal(0, 2, (2, 3, 7)).astype(np.float32)

ESTIMATORS = [(kl.k1, oracles.k1), (kl.k2, oracles.k2), (kl.k3, oracles.k3)]
NAMES = ["k1", "k2", "k3"]


@pytest.mark.parametrize(("estimator", "oracle"), ESTIMATORS, ids=NAMES)
def test_estimator_matches_the_oracle(estimator, oracle):
    output = estimator(LOGPROBS, REF_LOGPROBS)
    expected = oracle(LOGPROBS, REF_LOGPROBS)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("estimator", "oracle"), ESTIMATORS, ids=NAMES)
def test_estimator_gradient_matches_finite_differences(estimator, oracle):
    gradients = jax.grad(lambda x: jnp.sum(estimator(x, REF_LOGPROBS)))(LOGPROBS)
    expected = oracles.numerical_gradient(
        lambda x: float(oracle(x, REF_LOGPROBS).sum()), LOGPROBS
    )
    np.testing.assert_allclose(gradients, expected, rtol=1e-4, atol=1e-4)


def test_estimators_of_equal_models_are_0_and_k2_k3_never_negative():
    for estimator in (kl.k1, kl.k2, kl.k3):
        np.testing.assert_array_equal(estimator(LOGPROBS, LOGPROBS), 0.0)
    for estimator in (kl.k2, kl.k3):
        assert np.all(np.asarray(estimator(LOGPROBS, REF_LOGPROBS)) >= 0)


def test_k3_keeps_its_digits_near_0():
    x = np.float32(1e-3)
    output = float(kl.k3(jnp.array([x]), jnp.zeros(1))[0])
    assert output == pytest.approx(float(x) ** 2 / 2, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_estimators_average_to_the_exact_kl(temperature: float):
    """E_π of k1 and of k3, summed over the vocabulary, is the exact value."""
    policy = jax.nn.log_softmax(LOGITS / temperature)
    reference = jax.nn.log_softmax(REF_LOGITS / temperature)
    exact = kl.exact(LOGITS, REF_LOGITS, temperature=temperature)
    for estimator in (kl.k1, kl.k3):
        mean = jnp.sum(jnp.exp(policy) * estimator(policy, reference), axis=-1)
        np.testing.assert_allclose(mean, exact, rtol=1e-5)


@pytest.mark.parametrize(
    ("mu", "spread_k1", "spread_k2", "spread_k3", "bias_k2"),
    [(0.1, 20, 1.42, 1.42, 0.0025), (1.0, 2, 1.73, 1.70, 0.25)],
)
def test_published_spread_of_the_estimators(
    mu, spread_k1, spread_k2, spread_k3, bias_k2
):
    """std / KL and relative bias for π = N(0, 1), π_ref = N(μ, 1), KL = μ²/2."""
    s = np.linspace(-12.0, 12.0, 20001)  # a fine grid: the expectation itself
    weight = np.exp(-(s**2) / 2) / np.exp(-(s**2) / 2).sum()
    constant = np.log(2 * np.pi) / 2
    logprobs = (-(s**2) / 2 - constant).astype(np.float32)
    ref_logprobs = (-((s - mu) ** 2) / 2 - constant).astype(np.float32)
    truth = mu**2 / 2
    expected = [(0.0, spread_k1), (bias_k2, spread_k2), (0.0, spread_k3)]
    for (estimator, _), (bias, spread) in zip(ESTIMATORS, expected, strict=True):
        value = np.asarray(estimator(logprobs, ref_logprobs), np.float64)
        mean = (weight * value).sum()
        std = np.sqrt((weight * (value - mean) ** 2).sum())
        assert std / truth == pytest.approx(spread, abs=0.006)
        assert mean / truth - 1 == pytest.approx(bias, abs=2e-4)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_exact_matches_the_oracle(temperature: float):
    output = kl.exact(LOGITS, REF_LOGITS, temperature=temperature)
    expected = oracles.exact_kl(LOGITS, REF_LOGITS, temperature)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ((0.33, 0.32, 0.18, 0.12, 0.04, 0.01), 0.0041),
        ((0.15, 0.15, 0.40, 0.20, 0.08, 0.02), 0.2541),
        ((0.02, 0.02, 0.05, 0.01, 0.40, 0.50), 2.6733),
    ],
)
def test_published_six_words(policy, expected: float):
    reference = jnp.log(jnp.array([0.35, 0.30, 0.20, 0.10, 0.04, 0.01]))
    output = kl.exact(jnp.log(jnp.array(policy)), reference)
    assert float(output) == pytest.approx(expected, abs=5e-5)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_exact_of_equal_models_is_0_and_flat(temperature: float):
    def value(logits):
        return jnp.sum(kl.exact(logits, LOGITS, temperature=temperature))

    output = kl.exact(LOGITS, LOGITS, temperature=temperature)
    np.testing.assert_array_equal(output, np.zeros((2, 3)))
    np.testing.assert_allclose(jax.jit(jax.grad(value))(LOGITS), 0.0, atol=1e-6)


def test_exact_ignores_a_constant_added_to_the_logits():
    output = kl.exact(LOGITS + np.float32(50), REF_LOGITS - np.float32(9))
    expected = oracles.exact_kl(LOGITS, REF_LOGITS)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_exact_gradient_matches_finite_differences(direction):
    """In the policy's logits and the temperature, in both directions."""

    def value(logits, temperature):
        options = {"temperature": temperature, "direction": direction}
        return jnp.sum(kl.exact(logits, REF_LOGITS, **options))

    def oracle(logits, temperature):
        pair = (logits, REF_LOGITS) if direction == "reverse" else (REF_LOGITS, logits)
        return float(oracles.exact_kl(*pair, temperature).sum())

    gradient, slope = jax.grad(value, (0, 1))(LOGITS, jnp.float32(0.7))
    expected = oracles.numerical_gradient(lambda x: oracle(x, 0.7), LOGITS)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4)
    step = 1e-4
    expected = (oracle(LOGITS, 0.7 + step) - oracle(LOGITS, 0.7 - step)) / (2 * step)
    assert float(slope) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_exact_with_words_that_cannot_come():
    """Token 5 is impossible for the policy, and token 6 for both."""
    policy, reference = LOGITS[0, 0].copy(), REF_LOGITS[0, 0].copy()
    policy[[5, 6]] = -np.inf
    reference[6] = -np.inf
    output = kl.exact(policy, reference)
    assert float(output) == pytest.approx(oracles.exact_kl(policy, reference), rel=1e-5)
    short = kl.exact(policy[:6], reference[:6])
    assert float(output) == pytest.approx(float(short), rel=1e-6)
    gradients = jax.grad(kl.exact, (0, 1))(policy, reference)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert float(kl.exact(reference, policy)) == np.inf


def test_exact_takes_half_precision_to_float32():
    half, ref_half = LOGITS.astype(jnp.bfloat16), REF_LOGITS.astype(jnp.bfloat16)
    output = kl.exact(half, ref_half)
    assert output.dtype == jnp.float32
    expected = oracles.exact_kl(half.astype(np.float32), ref_half.astype(np.float32))
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_wrong_input_says_what_to_do():
    with pytest.raises(ValueError, match=r"got logprobs \(3, 5\), ref_logprobs \(3, 4"):
        kl.k1(LOGPROBS, REF_LOGPROBS[:, 1:])
    with pytest.raises(TypeError, match=r"ref_logprobs: expected float32, got float16"):
        kl.k3(LOGPROBS, REF_LOGPROBS.astype(np.float16))
    with pytest.raises(ValueError, match=r"got logits \(2, 3, 7\), ref_logits"):
        kl.exact(LOGITS, REF_LOGITS[..., :-1])
    with pytest.raises(ValueError, match=r"temperature: expected .* above 0, got 0"):
        kl.exact(LOGITS, REF_LOGITS, temperature=0)
    for function in (kl.exact, functools.partial(kl.top_k, k=2)):
        with pytest.raises(ValueError, match=r"direction: .* got 'backward'; choose"):
            function(LOGITS, REF_LOGITS, direction="backward")
