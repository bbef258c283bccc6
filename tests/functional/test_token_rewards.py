import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax.functional.token_rewards import token_rewards

pytestmark = pytest.mark.usefixtures("strict_dtypes")

# Ends at the last column, in the middle, after one token, never starts.
MASK = np.array(
    [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    bool,
)
RNG = np.random.default_rng(0)
SCORES = RNG.normal(0, 1, 4).astype(np.float32)
KL = RNG.normal(0, 1, MASK.shape).astype(np.float32)


def reward(scores=SCORES, kl=KL, mask=MASK, kl_coef=0.2):
    return token_rewards(scores=scores, kl=kl, mask=mask, kl_coef=kl_coef)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("kl", [KL, None])
def test_matches_the_oracle(kl, kl_coef: float):
    output = reward(kl=kl, kl_coef=kl_coef)
    assert output.dtype == jnp.float32
    expected = oracles.token_rewards(SCORES, kl, MASK, kl_coef)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-7)


def test_published_objective():
    """Score 0.875, KL 1.300, β 0.20: objective 0.615."""
    output = reward(
        scores=jnp.array([0.875]),
        kl=jnp.array([[7.0, 0.4, 0.8, 0.1, 7.0]]),
        mask=jnp.array([[False, True, True, True, False]]),
        kl_coef=jnp.float32(0.20),
    )
    np.testing.assert_allclose(output, [[0, -0.08, -0.16, 0.855, 0]], rtol=1e-6)
    assert float(jnp.sum(output)) == pytest.approx(0.615, abs=1e-6)


def test_rows_sum_to_score_minus_penalty_and_an_empty_row_gets_nothing():
    expected = SCORES - 0.2 * np.where(MASK, KL, 0).sum(1)
    expected[3] = 0.0
    output = np.asarray(reward())
    np.testing.assert_allclose(output.sum(1), expected, rtol=1e-5)
    np.testing.assert_array_equal(output[3], np.zeros(6))


def test_fractional_scores_are_kept():
    output = reward(scores=np.full(4, 0.7, np.float32), kl=None)
    assert float(output[0, -1]) == np.float32(0.7)


def test_rewards_of_turns_stand_at_their_turns_and_the_rest_of_the_score_at_the_end():
    output = token_rewards(
        scores=jnp.array([1.0, 2.0]),
        kl=jnp.array([[0.0, 1.0, 2.0, 9.0, 4.0], [0.0, 0.0, 9.0, 9.0, 8.0]]),
        mask=jnp.array([[0, 1, 1, 0, 1], [0, 1, 0, 0, 1]], bool),
        kl_coef=0.125,
        turn_rewards=jnp.array([[0.0, 0.0, 0.75, 7.0, 0.0], [0.0, -0.5, 0, 0, 0]]),
    )
    expected = [[0, -0.125, 0.75 - 0.25, 0, 0.25 - 0.5], [0, -0.5, 0, 0, 2.5 - 1]]
    np.testing.assert_array_equal(output, expected)


def test_the_score_mask_has_the_rest_of_the_score():
    """N+ puts it after the last token; rewards of turns keep their columns."""
    output = token_rewards(
        scores=jnp.array([1.0]),
        kl=None,
        mask=jnp.array([[True, False, True, False]]),
        kl_coef=0.5,
        score_mask=jnp.array([[True, False, True, True]]),
        turn_rewards=jnp.array([[0.25, 0.0, 0.0, 0.0]]),
    )
    np.testing.assert_array_equal(output, [[0.25, 0.0, 0.0, 0.75]])


def test_one_turn_without_a_reward_of_its_own_is_as_without_turns():
    nothing = np.zeros(MASK.shape, np.float32)
    output = token_rewards(
        scores=SCORES, kl=KL, mask=MASK, kl_coef=0.2, turn_rewards=nothing
    )
    np.testing.assert_array_equal(output, reward())


def test_garbage_changes_neither_value_nor_gradient():
    scores = np.append(SCORES[:3], np.float32(np.nan))

    def total(scores, kl):
        return jnp.sum(reward(scores=scores, kl=kl) ** 2)

    clean = jax.value_and_grad(total, (0, 1))(SCORES, KL)
    dirty = jax.value_and_grad(total, (0, 1))(scores, oracles.poison(KL, MASK))
    chex.assert_trees_all_equal(dirty, clean)


def test_gradient_is_linear():
    for_scores, for_kl = jax.grad(
        lambda scores, kl: jnp.sum(reward(scores=scores, kl=kl)), (0, 1)
    )(SCORES, KL)
    np.testing.assert_array_equal(for_scores, [1, 1, 1, 0])
    np.testing.assert_allclose(for_kl, np.where(MASK, -0.2, 0.0))


@pytest.mark.slow
def test_padding_and_row_order_change_nothing():
    sides = ((0, 0), (2, 3))
    wide = reward(kl=np.pad(KL, sides, constant_values=9), mask=np.pad(MASK, sides))
    np.testing.assert_array_equal(wide[:, 2:-3], reward())
    np.testing.assert_array_equal(wide[:, [0, 1, -3, -2, -1]], 0.0)
    order = np.array([2, 3, 1, 0])
    output = reward(scores=SCORES[order], kl=KL[order], mask=MASK[order])
    np.testing.assert_array_equal(output, np.asarray(reward())[order])


def test_wrong_input_says_what_to_do():
    with pytest.raises(ValueError, match=r"mask: expected shape \(any, any\), got"):
        reward(mask=MASK[0])
    with pytest.raises(TypeError, match=r"^kl: expected float32, got float16"):
        token_rewards(
            scores=jnp.asarray(SCORES),
            kl=jnp.asarray(KL, jnp.float16),
            mask=jnp.asarray(MASK),
            kl_coef=0.1,
        )
    with pytest.raises(TypeError, match=r"^mask: expected bool, got int32"):
        token_rewards(
            scores=jnp.asarray(SCORES),
            kl=None,
            mask=jnp.asarray(MASK, jnp.int32),
            score_mask=jnp.asarray(MASK),
            kl_coef=0.1,
        )
    with pytest.raises(ValueError, match=r"score_mask \(3, "):
        token_rewards(
            scores=jnp.asarray(SCORES),
            kl=None,
            mask=jnp.asarray(MASK),
            score_mask=jnp.asarray(MASK[:3]),
            kl_coef=0.1,
        )
    with pytest.raises(ValueError, match=r"scores: expected shape \(4\), got \(3,\)"):
        reward(scores=SCORES[:3])
    with pytest.raises(ValueError, match=r"got kl \(4, 4\), mask \(4, 6\); cut"):
        reward(kl=KL[:, 2:])
    with pytest.raises(TypeError, match=r"scores: expected float32, got int32; .*cast"):
        reward(scores=np.ones(4, np.int32))
    with pytest.raises(ValueError, match=r"kl_coef: expected .* 0 or more, got -0.1"):
        reward(kl_coef=-0.1)
