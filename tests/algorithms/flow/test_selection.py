"""Best-of-n as a stage: the rows it keeps, and its KL where all is known."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import enumerable

from rlhf_jax import masked
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.flow import rollout, selection
from rlhf_jax.functional import best_of_n
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL = enumerable.model(hidden_size=8)


def rows(count):
    """A rollout whose leaves contain their row number."""
    number = jnp.arange(count, dtype=jnp.int32)
    wide = jnp.repeat(number[:, None], 3, axis=1)
    return Rollout(
        tokens=wide,
        mask=wide >= 0,
        response_mask=wide % 2 == 0,
        old_logprobs=wide.astype(jnp.float32),
        entropy=wide.astype(jnp.float32),
        index=number // 3,
        sample=number % 3,
        sampler_logprobs=wide.astype(jnp.float32) + 0.5,
        version=wide + 7,
    )


@pytest.mark.parametrize(
    ("scores", "best_rows"),
    [
        ([1, 0, 2, 3, 5, 4], [2, 4]),
        ([1, 1, 0, 4, 4, 4], [0, 3]),  # ties go to the first
        ([-7, -9, -8, 0, -1, -2], [0, 3]),
        ([math.nan, -8, -9, math.inf, 1, -math.inf], [1, 4]),
        ([math.nan] * 3 + [math.nan, math.nan, -1e30], [0, 5]),
    ],
)
def test_the_best_of_each_group_is_kept_whole(scores, best_rows):
    scores = jnp.asarray(scores, jnp.float32)
    chosen, best = selection.best_of_n(rows(6), scores=scores, group_size=3)
    for ours, all_of_them in zip(
        jax.tree.leaves(chosen), jax.tree.leaves(rows(6)), strict=True
    ):
        np.testing.assert_array_equal(ours, np.asarray(all_of_them)[best_rows])
        assert ours.dtype == all_of_them.dtype
    np.testing.assert_array_equal(best, np.asarray(scores)[best_rows])


@pytest.mark.slow
def test_groups_of_one_are_the_rollout_itself():
    scores = jnp.array([3.0, math.nan, -1.0], jnp.float32)
    chosen, best = selection.best_of_n(rows(3), scores=scores, group_size=1)
    np.testing.assert_array_equal(chosen.tokens, rows(3).tokens)
    np.testing.assert_array_equal(best, scores)


@pytest.mark.parametrize(
    ("scores", "group_size", "kind", "message"),
    [
        (
            jnp.zeros(6),
            4,
            InputError,
            "expected to divide the 6 rows of a batch, got 4",
        ),
        (jnp.zeros(6), 0, InputError, "group_size: expected at least 1, got 0"),
        (jnp.zeros(5), 3, ValueError, r"scores: expected shape \(6\), got \(5,\)"),
        (jnp.zeros((6, 1)), 3, ValueError, "scores: expected shape"),
        (jnp.zeros(6, jnp.int32), 3, TypeError, "scores: expected float32, got int32"),
    ],
)
def test_wrong_input_says_what_to_do(scores, group_size, kind, message):
    with pytest.raises(kind, match=message):
        selection.best_of_n(rows(6), scores=scores, group_size=group_size)


@pytest.mark.slow
def test_its_cost_by_hand():
    """Best of 2 with 1 and with 3 better scores among 4 others."""
    stats = selection.kl_stats(
        jnp.array([[2.5], [0.5]], jnp.float32),
        among=jnp.array([[0, 1, 2, 3]] * 2, jnp.float32),
        n=2,
    )
    kl, count = stats["best_of_n/kl"]  # log 2 + log F, F by harmonic sums
    expected = 2 * math.log(2) - 1 / 4 - (1 / 2 + 1 / 3 + 1 / 4)
    np.testing.assert_allclose(kl, expected, rtol=1e-6)
    bound, of_bound = stats["best_of_n/kl_bound"]
    np.testing.assert_allclose(bound, 2 * (math.log(2) - 1 / 2), rtol=1e-6)
    assert count == of_bound == 2


# --- the world in which all is known ----------------------------------------------


@pytest.fixture(scope="module")
def world():
    return enumerable.draw(5, model=MODEL, distance=3.5)


N, GROUPS = 4, 4096


@pytest.fixture(scope="module")
def drawn(world):
    """Two rollouts of the reference; each prompt is read once for its four samples."""
    sample = jax.jit(
        functools.partial(
            rollout.rollout,
            model=MODEL,
            prompts=enumerable.prompts(N * GROUPS),
            max_new_tokens=enumerable.LENGTH,
            stop_ids=(),
            temperature=1.0,
            group_size=N,
        )
    )
    return [sample(world.start, key=jax.random.key(number)) for number in range(2)]


def log_best(log_ref, rewards, n):
    """log π_n(y), from the probabilities that n draws are at most, or below, r(y)."""
    log_ref = log_ref - np.logaddexp.reduce(log_ref)  # float32 until here
    reference = np.exp(log_ref)
    logprobs = np.zeros(len(rewards))
    for y, reward in enumerate(rewards):
        at_most = reference[rewards <= reward].sum() ** n
        lower = reference[rewards < reward].sum() ** n
        same = reference[rewards == reward].sum()
        logprobs[y] = log_ref[y] + np.log((at_most - lower) / same)
    return logprobs


def tied(rewards):
    """Four levels of reward with a quarter of the responses each."""
    return np.digitize(rewards, np.quantile(rewards, [0.25, 0.5, 0.75])).astype(float)


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [2, 8, 64])
def test_the_exact_kl_of_the_world_is_at_most_the_bound(world, n, ties):
    rewards = tied(world.rewards) if ties else world.rewards
    # In units of 2^-22, so that float32 adds the chances up without rounding.
    units = np.maximum(np.rint(np.exp(world.log_ref) * 2**22), 1)
    units[np.argmax(units)] += 2**22 - units.sum()
    log_ref = np.log(units / 2**22)
    best = log_best(log_ref, rewards, n)
    assert np.exp(best).sum() == pytest.approx(1, abs=1e-6)
    kl = enumerable.divergence(best, log_ref)
    output = best_of_n.exact_kl(
        jnp.asarray(units / 2**22, jnp.float32),
        scores=jnp.asarray(rewards, jnp.float32),
        n=n,
    )
    assert float(output) == pytest.approx(kl, abs=2e-6)
    bound = best_of_n.kl_bound(n)
    assert kl < bound
    # 256 responses tie with themselves alone, four levels a great deal.
    assert bound - kl > 0.015 if ties else bound - kl < 0.02
    # It gains reward, and no more than there is at its distance.
    assert enumerable.expected_reward(best, rewards) > enumerable.expected_reward(
        world.log_ref, rewards
    )
    if not ties:
        assert world.below_frontier(best) > -1e-6


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
def test_what_is_sampled_and_selected_is_best_of_n(world, drawn, ties):
    """Frequencies, reward and measured KL of 4096 responses, each the best of 4."""
    rewards = tied(world.rewards) if ties else world.rewards
    reward = enumerable.reward_of(jnp.asarray(rewards, jnp.float32))
    chosen, scores = selection.best_of_n(
        drawn[0], scores=reward(drawn[0]), group_size=N
    )
    best = log_best(world.log_ref, rewards, N)

    index = np.asarray(enumerable.index_of(chosen.tokens))
    np.testing.assert_allclose(scores, rewards[index], rtol=1e-6)
    expected = GROUPS * np.exp(best)
    counts = np.bincount(index, minlength=256)
    often = expected >= 5
    z = (counts - expected)[often] / np.sqrt(expected[often])
    assert often.sum() > 40
    assert abs(z).max() < 4.5
    assert np.mean(z**2) == pytest.approx(1, abs=0.5)
    mean = enumerable.expected_reward(best, rewards)
    spread = np.sqrt(np.exp(best) @ (rewards - mean) ** 2)
    assert float(scores.mean()) == pytest.approx(mean, abs=4 * spread / GROUPS**0.5)

    among = reward(drawn[1])
    kl = enumerable.divergence(best, world.log_ref)
    assert measured(scores[None], among[None, :2048]) == pytest.approx(kl, abs=0.06)
    if not ties:  # a few other samples to each choice are enough
        few = measured(scores[:, None], among.reshape(GROUPS, N))
        assert few == pytest.approx(kl, abs=0.06)


def measured(scores, among):
    stats = masked.mean_stats(selection.kl_stats(scores, among=among, n=N))
    assert float(stats["best_of_n/kl_bound"]) == pytest.approx(0.636, abs=1e-3)
    return float(stats["best_of_n/kl"])
