"""The generalised Jensen-Shannon divergence: loops, TRL's numbers, chunks, limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from places import FIXTURES

from rlhf_jax import kl
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import mixtures

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")

B, S, D, REF_D, V, PADDED = 2, 4, 6, 4, 11, 16
RNG = np.random.default_rng(0)
TRL = dict(np.load(FIXTURES / "trl_distillation.npz"))


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return RNG.normal(0, scale, shape).astype(np.float32)


# The reference is narrower and padded otherwise; rows of padding are garbage.
HIDDEN, REF_HIDDEN = normal(B, S, D), normal(B, S, REF_D)
HEAD, REF_HEAD = normal(PADDED, D), normal(V + 2, REF_D)
HEAD[V:], REF_HEAD[V:] = np.nan, 1e30
ARRAYS = (HIDDEN, HEAD, REF_HIDDEN, REF_HEAD)
WEIGHTS = normal(B, S)
CAPS = {"softcap": 1.5, "ref_softcap": 2.5}
FEW = 2 * B * S * 4  # four words at a time: three chunks, the last begins early
BETAS = [0.1, 0.5, 0.9]


def logprobs_of(hidden, head, cap, temperature):
    logits = oracles.logits_from_hidden(hidden, head[:V])
    logits = cap * np.tanh(logits / cap)
    logprobs = np.array(
        [oracles.log_softmax(x, temperature) for row in logits for x in row]
    )
    return logprobs.reshape(*hidden.shape[:2], V)


def oracle(hidden, head, ref_hidden, ref_head, *, beta, k=None, temperature=0.7):
    policy = logprobs_of(hidden, head, CAPS["softcap"], temperature)
    reference = logprobs_of(ref_hidden, ref_head, CAPS["ref_softcap"], temperature)
    values = np.zeros((B, S))
    for b, t in np.ndindex(B, S - 1):
        values[b, t + 1] = oracles.jensen_shannon(
            policy[b, t], reference[b, t], beta=beta, k=k
        )
    return values


def loss(hidden, head, ref_hidden, ref_head, *, weights, **options):
    options = {
        "vocab_size": V,
        "temperature": 0.7,
        "max_logits": FEW,
        **CAPS,
        **options,
    }
    output = kl.jensen_shannon_from_hidden(
        hidden, head, ref_hidden, ref_head, **options
    )
    # As a mask is applied, so that garbage outside of it is 0 and not NaN.
    return jnp.sum(jnp.where(weights != 0, output, 0.0) * weights), output


@functools.cache
def compiled(**options):
    gradient = jax.grad(loss, (0, 1, 2, 3), has_aux=True)
    return jax.jit(functools.partial(gradient, **options))


@pytest.mark.parametrize(
    ("beta", "k"),
    [
        (0.5, 3),
        *(
            pytest.param(beta, k, marks=pytest.mark.slow)
            for beta, k in [(0.1, None), (0.9, None), (0.9, 1), (0.1, V)]
        ),
    ],
)
def test_value_and_gradient_from_hidden_states(beta, k):
    """Two widths, heads, paddings and soft caps, in overlapping chunks."""
    gradients, output = compiled(beta=beta, k=k)(*ARRAYS, weights=WEIGHTS)
    np.testing.assert_allclose(output, oracle(*ARRAYS, beta=beta, k=k), atol=1e-6)
    for argument in (0, 1):

        def value(x, argument=argument):
            changed = (*ARRAYS[:argument], x, *ARRAYS[argument + 1 :])
            return float((oracle(*changed, beta=beta, k=k) * WEIGHTS).sum())

        x = ARRAYS[argument] if argument == 0 else ARRAYS[argument][:V]
        expected = oracles.numerical_gradient(value, x)
        np.testing.assert_allclose(gradients[argument][: len(x)], expected, atol=1e-5)
        np.testing.assert_array_equal(gradients[argument][len(x) :], 0.0)
    assert not any(gradient.any() for gradient in gradients[2:])


def test_equal_models_and_what_a_mask_leaves_out():
    run = compiled(beta=0.1, k=None)
    caps = {"softcap": 1.5, "ref_softcap": 1.5}
    equal = jax.jit(functools.partial(jax.grad(loss, has_aux=True), beta=0.3, **caps))
    gradient, output = equal(HIDDEN, HEAD, HIDDEN, HEAD, weights=WEIGHTS)
    np.testing.assert_allclose(output, 0.0, atol=1e-7)
    np.testing.assert_allclose(gradient, 0.0, atol=3e-6)
    weights = WEIGHTS.copy()
    weights[0, 2], weights[:, 0] = 0.0, 0.0
    expected, _ = run(*ARRAYS, weights=weights)
    hidden, ref_hidden = HIDDEN.copy(), REF_HIDDEN.copy()
    for array in (hidden, ref_hidden):
        array[0, 1], array[:, -1] = np.nan, np.inf
    poisoned, _ = run(hidden, HEAD, ref_hidden, REF_HEAD, weights=weights)
    for ours, theirs in zip(poisoned[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("source", "which"),
    [
        ("hidden states", [1]),
        pytest.param("hidden states", range(5), marks=pytest.mark.slow),
        pytest.param("logits", range(5), marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_trl(source, which):
    """On ragged masks; the head of the hidden states is the identity."""
    mask = TRL["mask"]
    head = np.eye(V, dtype=np.float32)

    def shifted(logits):
        return jnp.pad(logits, ((0, 0), (0, 1), (0, 0)))  # column t is about t + 1

    def from_hidden(logits, **options):
        pair = shifted(logits), head, shifted(TRL["ref_logits"]), head
        if "beta" in options:
            return kl.jensen_shannon_from_hidden(*pair, **options)[:, 1:]
        return kl.exact_from_hidden(*pair, **options)[:, 1:]

    def from_logits(logits, **options):
        if "beta" in options:
            return kl.jensen_shannon(logits, TRL["ref_logits"], **options)
        return kl.exact(logits, jnp.asarray(TRL["ref_logits"]), **options)

    @jax.jit
    def all_of_them(logits):
        results = {}
        for at in which:
            beta = float(TRL["betas"][at])
            options = {"beta": beta}
            if beta in (0.0, 1.0):
                options = {"direction": "forward" if beta == 0.0 else "reverse"}
            options["temperature"] = float(TRL["temperature"])

            def value(logits, options=options):
                output = of_source(logits, **options)
                return jnp.sum(output, where=mask) / float(mask.sum())

            results[at] = jax.value_and_grad(value)(logits)
        return results

    of_source = from_logits if source == "logits" else from_hidden
    for at, (value, gradient) in all_of_them(TRL["logits"]).items():
        assert float(value) == pytest.approx(TRL["losses"][at], abs=1e-6), at
        np.testing.assert_allclose(gradient, TRL["gradients"][at], atol=1e-6)


def test_losses_of_the_likeliest_tokens_are_those_of_trl_s_sdpo():
    """For every token, with a bucket for the tail, in five divergences."""
    head, k = np.eye(V, dtype=np.float32), int(TRL["sdpo_k"])

    @jax.jit
    def all_of_them(logits):
        def values(logits, beta):
            column = (0, 0), (0, 1), (0, 0)  # column t is about t + 1
            models = (
                *(jnp.pad(logits, column), head),
                *(jnp.pad(TRL["ref_logits"], column), head),
            )
            if beta in (0.0, 1.0):
                direction = "forward" if beta == 0.0 else "reverse"
                found = kl.exact_from_hidden(*models, direction=direction, k=k)
            else:
                found = kl.jensen_shannon_from_hidden(*models, beta=beta, k=k)
            return found[:, 1:].sum(), found[:, 1:]

        return [
            jax.grad(functools.partial(values, beta=float(beta)), has_aux=True)(logits)
            for beta in TRL["betas"]
        ]

    for at, (gradient, found) in enumerate(all_of_them(TRL["logits"])):
        np.testing.assert_allclose(found, TRL["sdpo_losses"][at], atol=1e-6)
        np.testing.assert_allclose(gradient, TRL["sdpo_gradients"][at], atol=1e-6)


def test_it_lies_between_0_and_its_largest_value_and_tends_to_both_kls():
    logits, ref_logits = jnp.asarray(normal(5, V)), normal(5, V)
    for beta in BETAS:
        largest = -beta * np.log(beta) - (1 - beta) * np.log(1 - beta)
        apart = kl.jensen_shannon(50.0 * logits, -50.0 * logits, beta=beta)
        np.testing.assert_allclose(apart, largest, rtol=1e-5)
        output = kl.jensen_shannon(logits, ref_logits, beta=beta)
        # Policy and reference change places with β and 1 - β.
        other = kl.jensen_shannon(jnp.asarray(ref_logits), logits, beta=1 - beta)
        np.testing.assert_allclose(output, other, rtol=1e-5)
        assert np.all(output > 0)
        assert np.all(output < largest)
    forward = kl.exact(jnp.asarray(ref_logits), logits)
    near_0 = kl.jensen_shannon(logits, ref_logits, beta=1e-4) / 1e-4
    np.testing.assert_allclose(near_0, forward, rtol=0.02)
    near_1 = kl.jensen_shannon(logits, ref_logits, beta=1 - 1e-4) / 1e-4
    np.testing.assert_allclose(near_1, kl.exact(logits, ref_logits), rtol=0.02)


def test_log_ratios_stay_finite_however_far_apart():
    log_ratio = jnp.array([-1e4, -1.0, -1e-6, 0.0, 1e-6, 1.0, 1e4])
    of_policy, of_reference = mixtures.mixture_log_ratios(log_ratio, beta=0.25)
    x = np.asarray(log_ratio, np.float64)
    mixture = np.logaddexp(np.log(0.75), np.log(0.25) + x)
    np.testing.assert_allclose(of_policy, -mixture, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(of_reference, x - mixture, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
def test_a_share_that_mixes_nothing_is_refused(beta):
    for call in (
        lambda: kl.jensen_shannon(jnp.zeros(3), jnp.zeros(3), beta=beta),
        lambda: kl.jensen_shannon_from_hidden(
            *map(jnp.asarray, ARRAYS), beta=beta, vocab_size=V
        ),
    ):
        with pytest.raises(InputError, match=r"^beta: expected a number above 0"):
            call()
