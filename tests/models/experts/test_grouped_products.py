"""Products of sorted rows with their group's matrix, against a loop over rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models.experts import grouped, kernels
from rlhf_jax.models.experts.grouped import grouped_product

RNG = np.random.default_rng(0)
# Empty groups first, last and between; rows of no group; fewer rows than groups; blocks
# of 8 and of 128 rows.
SIZES = {
    "empty": ([0, 3, 0, 9, 1, 0], 13),
    "tail": ([2, 5, 1], 12),
    "few": ([0, 1, 0, 0], 1),
    "one": ([7], 7),
    "wide": ([300, 10, 202], 512),
}


def arrays(name, dtype=np.float32):
    sizes, rows = SIZES[name]
    x = RNG.normal(size=(rows, 6)).astype(dtype)
    w = RNG.normal(size=(len(sizes), 6, 5)).astype(dtype)
    return x, w, np.array(sizes, np.int32)


def row_by_row(x, w, sizes):
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([x[i].astype(float) @ w[g] for i, g in enumerate(group)])


@pytest.mark.parametrize("name", SIZES)
def test_every_row_meets_the_matrix_of_its_group(name):
    x, w, sizes = arrays(name)
    y = jax.jit(grouped_product)(x, w, sizes=sizes)
    assert y.shape == (len(x), 5)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(
        y[: sizes.sum()], row_by_row(x, w, sizes), rtol=1e-5, atol=1e-5
    )


@pytest.fixture
def _interpreted(monkeypatch):
    """Runs GPU kernels in interpret mode."""
    for name in ("product", "of_weights"):
        function = functools.partial(getattr(kernels, name), interpret=True)
        monkeypatch.setattr(kernels, name, function)


@pytest.mark.cases(quick=4)
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    "function", [grouped._blocked, grouped._ragged, grouped._kernel]
)
@pytest.mark.parametrize("name", ["empty", "tail", "wide"])
def test_products_and_gradients_are_those_of_a_loop_over_rows(name, function):
    x, w, sizes = arrays(name)
    # More rows of a group are expected than there are, or fewer.
    load = grouped.Load(200, len(sizes))

    def product(x, w, sizes):
        return function(x, w, sizes, load)

    y = jax.jit(product)(x, w, sizes)[: sizes.sum()]
    np.testing.assert_allclose(y, row_by_row(x, w, sizes), rtol=1e-5, atol=1e-5)
    above = RNG.normal(size=(len(x), 5)).astype(np.float32)
    above[sizes.sum() :] = 0

    def total(x, w):
        return (above * product(x, w, sizes)).sum()

    of_x, of_w = jax.jit(jax.grad(total, argnums=(0, 1)))(x, w)
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected_x, expected_w = np.zeros(x.shape), np.zeros(w.shape)
    for i, g in enumerate(group):
        expected_x[i] = w[g].astype(float) @ above[i]
        expected_w[g] += np.outer(x[i].astype(float), above[i])
    np.testing.assert_allclose(
        of_x[: sizes.sum()], expected_x[: sizes.sum()], atol=1e-4
    )
    np.testing.assert_allclose(of_w, expected_w, atol=1e-4)


def test_the_gradient_of_matrices_is_no_ragged_product_where_xla_would_expand_it():
    """XLA would multiply every group with every row: 43 times Qwen3's products."""
    x, w, sizes = arrays("wide")

    def total(x, w):
        return (grouped_product(x, w, sizes=sizes) ** 2).sum()

    traced = jax.jit(jax.grad(total, argnums=(0, 1))).trace(x, w)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    results = re.findall(r"ragged_dot.*-> tensor<([0-9x]+)xf32>", text)
    assert sorted(results) == ["512x5", "512x6"]  # y, and the gradient of x


@pytest.mark.slow
@pytest.mark.usefixtures("_interpreted")
def test_kernels_of_gpus_have_the_derivative_of_a_gradient():
    x, w, sizes = arrays("empty")
    load = grouped.Load(len(x), len(sizes))

    def total(x, w):
        return (grouped._kernel(x, w, sizes, load)[: sizes.sum()] ** 2).sum()

    def expected(x, w):
        group = np.repeat(np.arange(len(sizes)), sizes)
        return (jnp.einsum("mi,mio->mo", x[: sizes.sum()], w[group]) ** 2).sum()

    own, plain = (
        jax.jvp(jax.grad(function, argnums=(0, 1)), (x, w), (x, w))[1]
        for function in (total, expected)
    )
    for a, b in zip(own, plain, strict=True):
        np.testing.assert_allclose(
            a[: sizes.sum()], b[: sizes.sum()], rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
def test_a_batch_of_groups_and_the_derivative_of_a_gradient():
    x, w, _ = arrays("empty")
    sizes = np.array([[0, 3, 0, 9, 1, 0], [13, 0, 0, 0, 0, 0]], np.int32)
    batched = jax.vmap(lambda s: grouped_product(x, w, sizes=s))(sizes)
    for row, own in zip(batched, sizes, strict=True):
        np.testing.assert_allclose(row, row_by_row(x, w, own), rtol=1e-5, atol=1e-5)

    def total(w):
        return (grouped_product(x, w, sizes=sizes[0]) ** 2).sum()

    _, curvature = jax.jvp(jax.grad(total), (w,), (w,))
    np.testing.assert_allclose(curvature, jax.grad(total)(w), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_summed_in_float32():
    x, w = np.ones((9, 600), np.float32), np.full((2, 600, 1), 1 / 3, np.float32)
    sizes = np.array([4, 5], np.int32)
    y = grouped_product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), sizes=sizes)
    assert y.dtype == jnp.bfloat16
    third = float(jnp.bfloat16(1 / 3))
    np.testing.assert_array_equal(np.float32(y), np.float32(jnp.bfloat16(600 * third)))
