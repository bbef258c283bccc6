import math
import types

import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import batch, masked
from rlhf_jax.algorithms.flow import objective
from rlhf_jax.algorithms.ppo import gae_experience
from rlhf_jax.functional import checks

MASK = np.array(
    [
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1],
    ],
    bool,
)
# Rows 0 and 3 answer alike (what differs is not theirs), row 1 with their start and
# row 2 with a token more.
TOKENS = np.array(
    [
        [9, 9, 4, 5, 1, 7],
        [9, 9, 4, 8, 8, 8],
        [8, 9, 4, 5, 1, 7],
        [3, 3, 4, 5, 1, 6],
        [9, 9, 4, 5, 2, 7],
    ],
    np.int32,
)
RNG = np.random.default_rng(11)
SCORES = np.array([1.0, -2.0, 0.5, 0.0, 3.0], np.float32)
VALUES, OLD, REF, ENTROPY = (
    RNG.normal(size=MASK.shape).astype(np.float32) for _ in range(4)
)


def scored(*, garbage: bool = False, **changes) -> batch.Scored:
    under = oracles.poison if garbage else (lambda x, mask: np.where(mask, x, 0.0))
    old, ref, values, entropy = (under(x, MASK) for x in (OLD, REF, VALUES, ENTROPY))
    arrays = {
        "scores": SCORES,
        "values": values,
        "ref_logprobs": ref,
        "kl": under(OLD - REF, MASK),
    }
    arrays = {k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()} | changes
    return batch.Scored(
        rollout=batch.Rollout(
            tokens=jnp.asarray(TOKENS),
            mask=jnp.asarray(MASK | [1, 1, 0, 0, 0, 0]),
            response_mask=jnp.asarray(MASK),
            old_logprobs=jnp.asarray(old, jnp.float32),
            entropy=jnp.asarray(entropy, jnp.float32),
            index=jnp.arange(5),
            sample=jnp.zeros(5, jnp.int32),
        ),
        **arrays,
    )


@pytest.mark.parametrize("whiten", ["rollout", "minibatch", None])
@pytest.mark.parametrize("garbage", [False, True])
def test_experience_against_loops(whiten, garbage):
    made = gae_experience(
        scored(garbage=garbage),
        kl_coef=0.2,
        gamma=0.9,
        lam=0.8,
        whiten_advantages=whiten,
    )
    rewards = oracles.token_rewards(SCORES, OLD - REF, MASK, 0.2)
    advantages, returns = oracles.gae(rewards, VALUES, MASK, 0.9, 0.8)
    if whiten == "rollout":
        advantages = oracles.masked_whiten(advantages, MASK)
    for output, expected in (
        (made.token_rewards, rewards),
        (made.advantages, advantages),
        (made.returns, returns),
    ):
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(made.response_mask, MASK)
    np.testing.assert_array_equal(made.tokens, TOKENS)


@pytest.mark.parametrize("ddof", [0, 1])
def test_advantages_are_whitened_with_the_variance_asked_for(ddof):
    made = gae_experience(
        scored(),
        kl_coef=jnp.float32(0.1),
        gamma=1.0,
        lam=0.9,
        whiten_rewards=None,
        whiten_advantages="rollout",
        whiten_ddof=ddof,
    )
    advantages = np.asarray(made.advantages, np.float64)[MASK]
    assert advantages.var(ddof=ddof) == pytest.approx(1.0, rel=1e-4)


def test_without_a_reference_there_is_no_penalty():
    made = gae_experience(
        scored(kl=None, ref_logprobs=None), kl_coef=0.2, gamma=1.0, lam=0.95
    )
    assert made.ref_logprobs is None
    np.testing.assert_allclose(
        made.token_rewards, oracles.token_rewards(SCORES, None, MASK, 0.2)
    )


def test_experience_needs_values():
    with pytest.raises(
        checks.InputError, match="expected a rollout scored by a critic"
    ):
        gae_experience(scored(values=None), kl_coef=0.1, gamma=1.0, lam=0.95)


def stats_of(output: batch.Scored) -> dict[str, float]:
    stats = objective.objective_stats(
        output,
        kl_coef=jnp.asarray(0.2, jnp.float32),
        ended=jnp.asarray([True, False, True, True, True]),
    )
    return {name: float(value) for name, value in masked.mean_stats(stats).items()}


@pytest.mark.parametrize("garbage", [False, True])
def test_objective_stats_against_loops(garbage):
    k1s, k3s, lengths, entropies, ref_nlls = [], [], [], [], []
    for b in range(5):
        columns = [t for t in range(6) if MASK[b, t]]
        x = [float(OLD[b, t]) - float(REF[b, t]) for t in columns]
        k1s.append(sum(x))
        k3s.append(sum(math.exp(-x) - 1 + x for x in x))
        lengths.append(len(columns))
        entropies += [float(ENTROPY[b, t]) for t in columns]
        ref_nlls += [-float(REF[b, t]) for t in columns]
    expected = {
        "objective/scores": 0.5,  # (1 - 2 + 0.5 + 0 + 3) / 5
        "objective/kl_coef": 0.2,
        "objective/kl": sum(k1s) / 5,
        "objective/kl_k3": sum(k3s) / 5,
        "objective/entropy": sum(entropies) / len(entropies),  # a mean over tokens
        "objective/ref_nll": sum(ref_nlls) / len(ref_nlls),
        "objective/non_score_reward": -0.2 * sum(k1s) / 5,
        "objective/rlhf_reward": 0.5 - 0.2 * sum(k1s) / 5,
        "response/length": sum(lengths) / 5,
        "response/eos_fraction": 0.8,
        "response/distinct_fraction": 0.8,  # row 3 repeats row 0
    }
    stats = stats_of(scored(garbage=garbage))
    assert stats.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, err_msg=name)


def test_objective_stats_without_a_reference():
    stats = stats_of(scored(kl=None, ref_logprobs=None))
    assert "objective/kl" not in stats
    assert "objective/kl_k3" not in stats
    assert "objective/ref_nll" not in stats
    assert stats["objective/non_score_reward"] == 0
    assert stats["objective/rlhf_reward"] == 0.5


def test_the_penalty_is_the_estimators_not_k1():
    """A KL of 2 nats at every token: 13 tokens of 5 responses at β = 0.2."""
    stats = stats_of(scored(kl=jnp.full(MASK.shape, 2.0)))
    np.testing.assert_allclose(
        stats["objective/non_score_reward"], -0.2 * 2 * MASK.sum() / 5, rtol=1e-6
    )
    np.testing.assert_allclose(
        stats["objective/kl"], ((OLD - REF) * MASK).sum() / 5, rtol=1e-4
    )


@pytest.mark.parametrize("garbage", [False, True])
def test_kl_by_position_against_loops(garbage):
    """Columns 2 to 5 are positions 0 to 3; 5, 4, 4 and 2 rows reach them."""
    by_position = objective.kl_by_position(scored(garbage=garbage), max_new_tokens=4)
    counts, k1s, k3s = [0.0] * 4, [0.0] * 4, [0.0] * 4
    for b in range(5):
        for t in range(6):
            if MASK[b, t]:
                x = float(OLD[b, t]) - float(REF[b, t])
                counts[t - 2] += 1
                k1s[t - 2] += x
                k3s[t - 2] += math.exp(-x) - 1 + x
    assert counts == [5, 4, 4, 2]
    for name, sums in (("k1", k1s), ("k3", k3s)):
        np.testing.assert_allclose(by_position[name][0], sums, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(by_position[name][1], counts)
    np.testing.assert_array_equal(by_position["responses"][0], counts)
    np.testing.assert_array_equal(by_position["responses"][1], 1)


def test_kl_by_position_adds_up_to_the_kl_of_a_response():
    by_position = objective.kl_by_position(scored(), max_new_tokens=4)
    stats = objective.objective_stats(
        scored(), kl_coef=jnp.float32(0.2), ended=jnp.zeros(5, bool)
    )
    for name, metric in (("k1", "objective/kl"), ("k3", "objective/kl_k3")):
        np.testing.assert_allclose(
            by_position[name][0].sum(), stats[metric][0], rtol=1e-5
        )


def test_positions_that_nothing_reaches_have_weight_0():
    by_position = objective.kl_by_position(scored(), max_new_tokens=6)
    np.testing.assert_array_equal(by_position["k1"][1], [0, 0, 5, 4, 4, 2])
    assert masked.mean_stats(by_position)["k1"][0] == 0


def test_kl_by_position_needs_a_reference():
    with pytest.raises(
        checks.InputError, match="expected a rollout with the log-probs of a ref"
    ):
        objective.kl_by_position(scored(kl=None, ref_logprobs=None), max_new_tokens=4)


def test_a_response_that_stands_twice_is_distinct_once():
    """Rows two, three and five repeat an earlier row."""
    tokens = jnp.asarray([[9, 4, 5], [9, 4, 5], [8, 4, 5], [9, 4, 6], [9, 4, 6]])
    mask = jnp.asarray([[0, 1, 1]] * 5, bool)
    rollout = types.SimpleNamespace(tokens=tokens, response_mask=mask)
    is_first = objective._first_of_its_kind(
        types.SimpleNamespace(rollout=rollout, turn_rewards=None, turn_ends=None)
    )
    np.testing.assert_array_equal(is_first, [1, 0, 0, 1, 0])
