import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import masked

pytestmark = pytest.mark.usefixtures("strict_dtypes")

MASK = np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
X = np.random.default_rng(0).normal(2.0, 3.0, MASK.shape).astype(np.float32)


def weights() -> np.ndarray:
    """Weights that make the gradients of all entries different."""
    return np.arange(1, X.size + 1, dtype=np.float32).reshape(X.shape) / 10


def test_lengths_to_mask():
    output = masked.lengths_to_mask(jnp.array([2, 0, 4, 9], jnp.int32), size=4)
    assert output.dtype == jnp.bool_
    np.testing.assert_array_equal(
        output, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    )


def test_last_true():
    np.testing.assert_array_equal(
        masked.last_true(jnp.asarray(MASK)),
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]],
    )
    np.testing.assert_array_equal(
        masked.last_true(jnp.asarray(MASK[:, :4]))[0], [0, 0, 1, 0]
    )


def test_sum_mean_and_variance_match_the_oracle():
    mean = oracles.masked_mean(X, MASK)
    assert float(masked.masked_mean(X, mask=MASK)) == pytest.approx(mean, rel=1e-5)
    assert float(masked.masked_sum(X, mask=MASK)) == pytest.approx(8 * mean, rel=1e-5)
    for ddof in (0, 1):
        output = masked.masked_var(X, mask=MASK, ddof=ddof)
        expected = oracles.masked_var(X, MASK, ddof)
        assert float(output) == pytest.approx(expected, rel=1e-5)


def test_mean_along_an_axis_is_row_by_row():
    output = masked.masked_mean(X, mask=MASK, axis=1)
    expected = [oracles.masked_mean(x, mask) for x, mask in zip(X, MASK, strict=True)]
    assert expected[1] == 0.0
    np.testing.assert_allclose(output, expected, rtol=1e-5)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_matches_the_oracle(shift_mean: bool, ddof: int):
    output = masked.masked_whiten(X, mask=MASK, shift_mean=shift_mean, ddof=ddof)
    expected = oracles.masked_whiten(X, MASK, shift_mean, ddof)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ddof", "first"), [(0, 0.0508), (1, 0.1394)])
def test_whiten_published_example(ddof: int, first: float):
    rewards = jnp.linspace(1.2, 2.0, 9).reshape(3, 3)
    everything = jnp.ones((3, 3), jnp.bool_)
    output = masked.masked_whiten(rewards, mask=everything, shift_mean=False, ddof=ddof)
    assert float(output[0, 0]) == pytest.approx(first, abs=5e-5)


def test_whitened_has_mean_0_and_variance_1():
    output = masked.masked_whiten(X, mask=MASK)
    assert float(masked.masked_mean(output, mask=MASK)) == pytest.approx(0, abs=1e-6)
    assert float(masked.masked_var(output, mask=MASK)) == pytest.approx(1, rel=1e-5)
    np.testing.assert_array_equal(np.asarray(output)[~MASK], 0.0)


def test_whitening_a_large_mean_keeps_its_digits():
    output = masked.masked_whiten(X + np.float32(1000), mask=MASK)
    expected = oracles.masked_whiten(X, MASK)
    np.testing.assert_allclose(output, expected, atol=1e-3)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("number", [100.1, 1000.1, -7.3e-6, 1.7e20, 3e38])
@pytest.mark.parametrize("count", [3, 300, 100_003])
def test_equal_numbers_are_whitened_to_0(number, count):
    x = jnp.full((count + 7,), number, jnp.float32)
    mask = jnp.arange(count + 7) < count

    @jax.jit
    def whitening(x, mask):
        return (
            masked.masked_whiten(x, mask=mask),
            masked.masked_mean(x, mask=mask),
            masked.masked_whiten(x, mask=mask, shift_mean=False),
        )

    whitened, mean, selected = whitening(x, mask)
    np.testing.assert_array_equal(whitened, np.zeros(count + 7, np.float32))
    assert float(mean) == np.float32(number)
    np.testing.assert_array_equal(selected, np.where(mask, np.float32(number), 0))


@pytest.mark.parametrize("number", [100.1, 1000.1])
def test_equal_numbers_are_whitened_to_0_on_a_mesh(number):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    x = jax.device_put(jnp.full((296, 3), number, jnp.float32), rows)
    mask = jax.device_put(jnp.arange(888).reshape(296, 3) % 5 > 0, rows)
    output = jax.jit(lambda x, mask: masked.masked_whiten(x, mask=mask))(x, mask)
    assert len(output.sharding.device_set) == 8
    np.testing.assert_array_equal(output, np.zeros((296, 3), np.float32))


@pytest.mark.slow
def test_numbers_a_digit_apart_are_whitened_as_in_float64():
    x = np.full((300,), 1000.1, np.float32)
    x[7] = np.nextafter(x[7], np.float32(2000))
    mask = np.ones(300, bool)
    expected = oracles.masked_whiten(x, mask)
    assert 0.2 < expected[7] < 1
    output = masked.masked_whiten(x, mask=mask)
    np.testing.assert_allclose(output, expected, rtol=1e-5)


def test_one_entry_has_no_spread_and_an_empty_mask_gives_0():
    for mask in (np.zeros_like(MASK), np.arange(X.size).reshape(X.shape) == 7):
        for ddof in (0, 1):
            assert float(masked.masked_var(X, mask=mask, ddof=ddof)) == 0.0
            output = masked.masked_whiten(X, mask=mask, ddof=ddof)
            np.testing.assert_array_equal(output, np.zeros_like(X))


REDUCTIONS = {
    "sum": masked.masked_sum,
    "mean": masked.masked_mean,
    "var": masked.masked_var,
    "whiten": lambda x, mask: jnp.sum(masked.masked_whiten(x, mask=mask) * weights()),
    "whiten_keep": lambda x, mask: jnp.sum(
        masked.masked_whiten(x, mask=mask, shift_mean=False) * weights()
    ),
}


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_garbage_changes_neither_value_nor_gradient(name: str):
    @jax.jit
    def both(x):
        return jax.value_and_grad(lambda x: REDUCTIONS[name](x, mask=MASK))(x)

    clean, dirty = both(X), both(oracles.poison(X, MASK))
    assert np.isfinite(clean[0])
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    np.testing.assert_array_equal(np.asarray(clean[1])[~MASK], 0.0)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("mean", oracles.masked_mean),
        ("var", oracles.masked_var),
        ("whiten", lambda x, m: float((oracles.masked_whiten(x, m) * weights()).sum())),
    ],
)
def test_gradient_matches_finite_differences(name, oracle):
    gradient = jax.grad(lambda x: REDUCTIONS[name](x, mask=MASK))(X)
    expected = oracles.numerical_gradient(lambda x: oracle(x, MASK), X)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_whiten_is_invariant_to_padding_and_row_order():
    output = masked.masked_whiten(X, mask=MASK)
    wide, wide_mask = np.pad(X, ((0, 2), (3, 1))), np.pad(MASK, ((0, 2), (3, 1)))
    padded = masked.masked_whiten(wide, mask=wide_mask)
    np.testing.assert_allclose(padded[:3, 3:-1], output, rtol=1e-5, atol=1e-6)
    swapped = masked.masked_whiten(X[::-1], mask=MASK[::-1])
    np.testing.assert_allclose(swapped[::-1], output, rtol=1e-5, atol=1e-6)


def stats(total: float, weight: float, largest: float) -> masked.Stats:
    pair = jnp.float32(total), jnp.float32(weight)
    return {"loss": pair, "loss_max": (jnp.float32(largest), None)}


def test_stats_of_parts_weigh_by_count_and_maxima_do_not_add():
    # Means 2 (of 1) and 5 (of 3) are 17/4 together, not 3.5.
    both = masked.add_stats(stats(2, 1, 7), stats(15, 3, 4))
    means = masked.mean_stats(both)
    assert {name: float(mean) for name, mean in means.items()} == {
        "loss": 4.25,
        "loss_max": 7.0,
    }


def test_total_stats_reads_what_scan_stacks():
    def part(carry, numbers):
        total, weight, largest = numbers
        return carry, {"loss": (total, weight), "loss_max": (largest, None)}

    parts = tuple(jnp.array(x) for x in ([2.0, 15.0], [1.0, 3.0], [7.0, 4.0]))
    _, stacked = jax.lax.scan(part, None, parts)
    means = masked.mean_stats(masked.total_stats(stacked))
    assert (float(means["loss"]), float(means["loss_max"])) == (4.25, 7.0)


def test_a_statistic_of_nothing_is_0():
    means = jax.jit(masked.mean_stats)(stats(0, 0, 1))
    assert float(means["loss"]) == 0.0


def test_wrong_input_says_what_to_do():
    with pytest.raises(ValueError, match=r"got x \(3, 5\), mask \(3,\); cut"):
        masked.masked_mean(X, mask=MASK[:, 0])
    with pytest.raises(TypeError, match=r"mask: expected bool, got int32; make masks"):
        masked.masked_sum(X, mask=MASK.astype(np.int32))
    with pytest.raises(TypeError, match=r"x: expected float32, got float16; .*cast"):
        masked.masked_whiten(X.astype(np.float16), mask=MASK)
    with pytest.raises(ValueError, match=r"ddof: expected one of 0, 1, got 2; choose"):
        masked.masked_var(X, mask=MASK, ddof=2)
    with pytest.raises(TypeError, match=r"lengths: expected int32, got float32; cast"):
        masked.lengths_to_mask(jnp.ones(3), size=4)
    with pytest.raises(ValueError, match=r"lengths: expected shape \(any\), got"):
        masked.lengths_to_mask(jnp.ones((3, 1), jnp.int32), size=4)
    with pytest.raises(ValueError, match=r"equal names, got .*; add statistics"):
        masked.add_stats(stats(1, 1, 1), {"loss": stats(1, 1, 1)["loss"]})


def test_a_column_of_another_shape_than_its_mask():
    with pytest.raises(ValueError, match=r"got x \(5,\), mask \(3, 5\)"):
        masked.sum_stats({"x": jnp.asarray(X[0])}, mask=jnp.asarray(MASK))
    with pytest.raises(TypeError, match=r"mask: expected bool, got int32"):
        masked.sum_stats({"x": jnp.asarray(X)}, mask=jnp.asarray(MASK, jnp.int32))


def test_total_stats_keeps_all_axes_but_the_first():
    sums, weights = np.arange(6.0).reshape(3, 2), np.arange(6.0, 12.0).reshape(3, 2)
    stats = {"sum": (jnp.asarray(sums, jnp.float32), jnp.asarray(weights, jnp.float32))}
    stats["max"] = (jnp.asarray([[1.0, 7.0], [4.0, 2.0]]), None)
    total = masked.total_stats(stats)
    np.testing.assert_array_equal(total["sum"], [[6.0, 9.0], [24.0, 27.0]])
    np.testing.assert_array_equal(total["max"][0], [4.0, 7.0])
