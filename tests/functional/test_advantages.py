import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import advantages

pytestmark = pytest.mark.usefixtures("strict_dtypes")

# Ends at the last column, in the middle, after one token, never starts.
MASK = np.array(
    [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    bool,
)
RNG = np.random.default_rng(0)
REWARDS = RNG.normal(0, 1, MASK.shape).astype(np.float32)
VALUES = RNG.normal(0, 1, MASK.shape).astype(np.float32)


def gae(rewards=REWARDS, values=VALUES, mask=MASK, gamma=0.9, lam=0.8):
    return advantages.gae(
        rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam
    )


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (0.9, 1.0), (0.0, 0.5)]
)
def test_matches_the_oracle(gamma: float, lam: float):
    for output, expected in zip(
        gae(gamma=gamma, lam=lam),
        oracles.gae(REWARDS, VALUES, MASK, gamma, lam),
        strict=True,
    ):
        assert output.dtype == jnp.float32
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_by_hand():
    # δ = (1 + 3 - 2, 4 - 3) = (2, 1), A = (2 + ½·1, 1); the value 9 belongs to nothing.
    advantages, returns = gae(
        rewards=jnp.array([[1.0, 4.0, 7.0]]),
        values=jnp.array([[2.0, 3.0, 9.0]]),
        mask=jnp.array([[True, True, False]]),
        gamma=1.0,
        lam=0.5,
    )
    np.testing.assert_array_equal(advantages, [[2.5, 1.0, 0.0]])
    np.testing.assert_array_equal(returns, [[4.5, 4.0, 0.0]])


def test_lam_1_is_the_discounted_return_minus_the_value():
    advantages, returns = gae(lam=1.0)
    for b, t in oracles.entries(MASK):
        later = [u for u in range(t, 6) if MASK[b, u]]
        discounted = sum(0.9 ** (u - t) * REWARDS[b, u] for u in later)
        assert float(returns[b, t]) == pytest.approx(discounted, abs=1e-5)
        assert float(advantages[b, t]) == pytest.approx(
            discounted - VALUES[b, t], abs=1e-5
        )


def test_exact_values_leave_no_advantage():
    """When the critic knows the return, every advantage is 0 at any lam."""
    _, returns = gae(lam=1.0)
    advantages, _ = gae(values=returns, lam=0.3)
    np.testing.assert_allclose(advantages, np.zeros_like(REWARDS), atol=1e-6)


def test_zero_rewards_and_values_give_zeros():
    for output in gae(np.zeros_like(REWARDS), np.zeros_like(VALUES)):
        np.testing.assert_array_equal(output, np.zeros_like(REWARDS))


def total(rewards, values):
    advantages, returns = gae(rewards, values)
    weights = np.arange(1, MASK.size + 1, dtype=np.float32).reshape(MASK.shape)
    return jnp.sum(advantages * weights) + jnp.sum(returns**2)


@pytest.mark.slow
def test_garbage_changes_neither_value_nor_gradient():
    dirty = oracles.poison(REWARDS, MASK), oracles.poison(VALUES, MASK)
    for output, expected in zip(gae(*dirty), gae(), strict=True):
        np.testing.assert_array_equal(output, expected)
        np.testing.assert_array_equal(np.asarray(output)[~MASK], 0.0)
    gradients = jax.grad(total, (0, 1))
    for output, expected in zip(
        gradients(*dirty), gradients(REWARDS, VALUES), strict=True
    ):
        np.testing.assert_array_equal(output, expected)


def test_gradient_matches_finite_differences():
    weights = np.arange(1, MASK.size + 1).reshape(MASK.shape)

    def oracle(rewards, values):
        advantages, returns = oracles.gae(rewards, values, MASK, 0.9, 0.8)
        return float((advantages * weights + returns**2).sum())

    gradients = jax.grad(total, (0, 1))(REWARDS, VALUES)
    for_rewards = oracles.numerical_gradient(lambda x: oracle(x, VALUES), REWARDS)
    for_values = oracles.numerical_gradient(lambda x: oracle(REWARDS, x), VALUES)
    np.testing.assert_allclose(gradients[0], for_rewards, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients[1], for_values, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_padding_row_order_and_jit_change_nothing():
    sides = ((0, 0), (2, 3))
    wide = [np.pad(x, sides) for x in (REWARDS, VALUES, MASK)]
    order = np.array([2, 3, 1, 0])
    shuffled = gae(REWARDS[order], VALUES[order], MASK[order])
    jitted = jax.jit(advantages.gae)(
        rewards=REWARDS, values=VALUES, mask=MASK, gamma=0.9, lam=0.8
    )
    for i, expected in enumerate(gae()):
        np.testing.assert_array_equal(gae(*wide)[i][:, 2:-3], expected)
        np.testing.assert_array_equal(shuffled[i], np.asarray(expected)[order])
        np.testing.assert_allclose(jitted[i], expected, rtol=1e-6, atol=1e-6)


# Two turns, three with one of a single token, one turn, a turn at the very end.
TURNS = np.array(
    [
        [0, 1, 1, 0, 0, 1, 1, 1, 0],
        [0, 1, 0, 1, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 1],
    ],
    bool,
)


@pytest.mark.slow
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.9, 0.0)])
def test_columns_outside_the_mask_are_no_steps(gamma: float, lam: float):
    """The oracle gets rows without these columns."""
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(0, 1, (2, *TURNS.shape)).astype(np.float32)
    of_turns = gae(rewards, values, TURNS, gamma=gamma, lam=lam)
    for b, mask in enumerate(TURNS):
        rows = (x[None, b, mask] for x in (rewards, values))
        alone = oracles.gae(*rows, np.ones((1, mask.sum()), bool), gamma, lam)
        for output, expected in zip(of_turns, alone, strict=True):
            np.testing.assert_allclose(output[b, mask], expected[0], 1e-5, 1e-6)
            np.testing.assert_array_equal(output[b, ~mask], 0.0)


def test_the_state_after_a_turn_is_the_one_before_the_next_sampled_token():
    advantages, returns = gae(
        rewards=jnp.array([[1.0, 7.0, 7.0, 4.0]]),
        values=jnp.array([[2.0, 9.0, 9.0, 3.0]]),
        mask=jnp.array([[True, False, False, True]]),
        gamma=1.0,
        lam=0.5,
    )
    np.testing.assert_array_equal(advantages, [[2.5, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(returns, [[4.5, 0.0, 0.0, 4.0]])


def of_one_run(rewards, values, mask, gamma, lam):
    """GAE as it was before turns, for masks with one run of True."""
    values = jnp.where(mask, values, 0.0)
    next_values = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    deltas = jnp.where(mask, rewards, 0.0) + gamma * next_values - values

    def step(next_advantage, column):
        delta, inside = column
        advantage = jnp.where(inside, delta + gamma * lam * next_advantage, 0.0)
        return advantage, advantage

    end = jnp.zeros_like(deltas[:, 0])
    columns = deltas.T, mask.T
    _, advantages = jax.lax.scan(step, end, columns, reverse=True)
    return advantages.T, advantages.T + values


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True])
def test_one_run_of_true_keeps_its_bits(*, jitted: bool):
    """Recorded curves of one turn do not change; at 0.9 roundings could differ."""
    rng = np.random.default_rng(2)
    rewards, values = rng.normal(0, 1, (2, 16, 64)).astype(np.float32)
    start, length = rng.integers(0, 64, (2, 16, 1))
    columns = np.arange(64)[None, :]
    mask = (columns >= start) & (columns < start + length)
    arrays = [jnp.asarray(x) for x in (rewards, values, mask)]
    of_now, of_then = (
        (jax.jit(function) if jitted else function)(*arrays)
        for function in (gae, lambda r, v, m: of_one_run(r, v, m, 0.9, 0.8))
    )
    for output, expected in zip(of_now, of_then, strict=True):
        np.testing.assert_array_equal(output, expected)


def test_wrong_input_says_what_to_do():
    with pytest.raises(ValueError, match=r"rewards \(4, 6\), values \(4, 5\), mask"):
        gae(values=VALUES[:, 1:])
    with pytest.raises(TypeError, match=r"values: expected float32, got float16; .*"):
        gae(values=VALUES.astype(np.float16))
    with pytest.raises(TypeError, match=r"mask: expected bool, got float32; make"):
        gae(mask=MASK.astype(np.float32))
