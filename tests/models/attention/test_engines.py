"""Engines of attention against a float64 oracle: values, gradients, padding."""

import functools

import attention_cases
import jax
import numpy as np
import oracles
import pytest

from rlhf_jax.models.attention import attend_blockwise, attend_xla

# Four blocks of 29 columns, the last of them with room.
ENGINES = {
    "xla": attend_xla,
    "blockwise": functools.partial(attend_blockwise, block=8),
}
each_case = pytest.mark.parametrize("name", attention_cases.CASES)
each_engine = pytest.mark.parametrize("engine", ENGINES)


@each_engine
@each_case
def test_values_and_gradients_are_the_oracles(engine, name):
    """At tokens; also with large numbers at padding, which is finite all the same."""
    run = attention_cases.with_gradients(ENGINES[engine], name)
    expected = attention_cases.expected(name)
    garbage = {"xla": 1e4, "blockwise": np.nan}[engine]
    for given in (
        attention_cases.arrays(name)[:3],
        attention_cases.poisoned(name, by=garbage),
    ):
        out, gradients = run(*given)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(
            np.where(attention_cases.live(name), out, 0), expected[0], atol=2e-5
        )
        for mine, other in zip(gradients, expected[1], strict=True):
            np.testing.assert_allclose(mine, other, atol=2e-5)


def test_the_oracle_s_gradients_are_those_of_its_values():
    name = "window, soft cap, grouped heads"
    rng = np.random.default_rng(1)
    query, gradient = rng.normal(size=(2, 1, 2, 3, 2))
    key, value = rng.normal(size=(2, 1, 1, 4, 2))
    segments = np.array([[1, 1, 1, 2]])
    options = dict(attention_cases.CASES[name][3], gradient=gradient)
    options["window"] = 2
    _, gradients = oracles.attention(query, key, value, segments, **options)
    inputs = [query, key, value]
    for place, mine in enumerate(gradients):

        def total(x, place=place):
            moved = [*inputs[:place], x, *inputs[place + 1 :]]
            return float(
                (oracles.attention(*moved, segments, **options)[0] * gradient).sum()
            )

        numerical = oracles.numerical_gradient(total, inputs[place])
        np.testing.assert_allclose(mine, numerical, atol=1e-8)


def test_forward_mode_and_products_with_the_hessian():
    """Blockwise attention against `xla`, which JAX differentiates by itself."""
    name = "window, soft cap, grouped heads"
    *given, weights = attention_cases.arrays(name)
    rng = np.random.default_rng(2)
    moved = [rng.normal(size=x.shape).astype(np.float32) for x in given]
    mask = attention_cases.mask_of(name)
    weights = np.where(attention_cases.live(name), weights, 0)

    def both(engine):
        def total(*arrays):
            query, *keys_values = arrays
            return (engine(query, tuple(keys_values), mask=mask) * weights).sum()

        gradient = jax.grad(total, (0, 1, 2))
        return jax.jit(
            lambda: (
                jax.jvp(total, tuple(given), tuple(moved)),
                jax.jvp(gradient, tuple(given), tuple(moved))[1],
            )
        )()

    found, expected = (both(engine) for engine in ENGINES.values())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        found,
        expected,
    )
