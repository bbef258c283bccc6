"""Gradients of policy, critic and decoder, with layers scanned and unrolled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiers import one_in

from rlhf_jax import decoder, policy
from rlhf_jax.models import layout
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles import critic

LENGTHS, SIZE = (6, 4, 1, 5), 6
STEP = 5e-3
STENCIL = {1: 8 / 12, -1: -8 / 12, 2: -1 / 12, -2: 1 / 12}  # of fourth order
TOKENS, MASK = tiny.batch(LENGTHS, SIZE, side="left")


def logprobs_and_entropy(params, model):
    return policy.logprobs_and_entropy(
        params, model=model, tokens=TOKENS, mask=MASK, temperature=0.7
    )


def exact_kl(params, model):
    hidden = decoder.hidden_states(params, model=model, tokens=TOKENS, mask=MASK)
    fixed = tiny.params(model, seed=1)
    return policy.exact_kl(
        *(params, hidden, fixed, jnp.cos(hidden * 0 + 1.0)),
        texts=texts_of(TOKENS, MASK),
        model=model,
    )


def values(params, model):
    score = {"kernel": jnp.linspace(-1.0, 1.0, model.hidden_size), "bias": 0.5}
    score = jax.tree.map(jnp.float32, score)
    whole = {"trunk": params, "score": score}
    return critic.values(whole, model=model, tokens=TOKENS, mask=MASK)


def hidden_states(params, model):
    hidden = decoder.hidden_states(params, model=model, tokens=TOKENS, mask=MASK)
    return jnp.where(MASK[..., None], hidden, 0.0)


def logits(params, model):
    return decoder.logits(params, hidden_states(params, model), model=model)


QUICK, LONG = [logprobs_and_entropy, exact_kl], [values, hidden_states, logits]
MODELS = {
    "gpt2": tiny.GPT2,
    "llama, one by one": dataclasses.replace(tiny.LLAMA, unroll=True),
    "mixed, rematerialised": dataclasses.replace(tiny.MIXED, remat="dots"),
}


def inner(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum(float(np.sum(np.float64(a) * np.float64(b))) for a, b in pairs)


def like(tree, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32),
        tree,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "name"),
    one_in(2, [(role, "gpt2") for role in QUICK])
    + [
        pytest.param(role, name, marks=pytest.mark.long)
        for name in MODELS
        for role in QUICK + LONG
        if name != "gpt2" or role in LONG
    ],
)
def test_gradients_are_finite_differences(role, name):
    model = MODELS[name]
    params = tiny.params(model)
    v = like(params, seed=2, scale=0.1)

    def function(params):
        return role(params, model)

    @jax.jit
    def evaluate(params, v):
        y, pull = jax.vjp(function, params)
        weights = like(y, seed=3)
        line = jnp.asarray([STEP * offset for offset in STENCIL], jnp.float32)
        points = jax.lax.map(
            lambda t: function(jax.tree.map(lambda a, b: a + t * b, params, v)), line
        )
        return weights, pull(weights)[0], points

    weights, pulled, points = evaluate(params, v)
    rule = np.array(list(STENCIL.values())) / STEP
    slope = jax.tree.map(
        lambda leaf: np.einsum("p,p...->...", rule, np.asarray(leaf, np.float64)),
        points,
    )
    # Rounding of every slope, as it counts in their sum.
    error = 5e-3 * np.sqrt(inner(weights, weights))
    assert inner(pulled, v) == pytest.approx(inner(weights, slope), rel=5e-3, abs=error)


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 6, 4)])
def test_a_product_has_a_gradient_and_products_with_its_hessian(shape):
    rng = np.random.default_rng(0)
    right = (*shape[:-2], shape[-1], 5)
    x, x_dot = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in "ab")
    w, w_dot = (jnp.asarray(rng.normal(size=right), jnp.float32) for _ in "ab")

    def gradient(x, w):
        return jax.grad(lambda x, w: layout.product(x, w).sum(), (0, 1))(x, w)

    ones = np.ones((*shape[:-1], 5))
    of_x, of_w = gradient(x, w)
    np.testing.assert_allclose(
        of_x, ones @ np.swapaxes(w, -1, -2), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        of_w, np.swapaxes(x, -1, -2) @ ones, rtol=1e-5, atol=1e-5
    )
    _, (of_x, of_w) = jax.jvp(gradient, (x, w), (x_dot, w_dot))
    np.testing.assert_allclose(
        of_x, ones @ np.swapaxes(w_dot, -1, -2), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        of_w, np.swapaxes(x_dot, -1, -2) @ ones, rtol=1e-5, atol=1e-5
    )
