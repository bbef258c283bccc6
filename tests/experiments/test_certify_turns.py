"""Two-turn episodes by enumeration: claims hold, and wrong formulas fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from certificates.measured import turns
from worlds import conversations

from rlhf_jax.algorithms.ppo import loss

pytestmark = pytest.mark.usefixtures("quick_compilation")
CLAIMS = {claim.name: claim for claim in turns.CLAIMS}


@pytest.fixture(scope="module")
def case():
    return turns.draw(0, hidden_size=8)


@pytest.mark.slow
def test_every_episode_is_there_once(case):
    episodes = jax.device_get(case.episodes)
    rows = {
        (tuple(tokens[mask]), tuple(sampled[mask]))
        for tokens, mask, sampled in zip(
            episodes.tokens, episodes.mask, episodes.response_mask, strict=True
        )
    }
    assert len(rows) == len(episodes.tokens) == 9 + 4 * 2 * 13
    for tokens, mask, sampled, ends in zip(
        episodes.tokens,
        episodes.mask,
        episodes.response_mask,
        episodes.turn_ends,
        strict=True,
    ):
        followed = tokens[1:][mask[1:]].tolist()
        own = sampled[1:][mask[1:]]
        first = followed[: own.argmin() if not own.all() else len(own)]
        assert 1 <= len(first) <= 2
        if own.all():  # a turn without a 3 ended the episode
            assert 3 not in first
            assert not ends.any()
            continue
        assert first[-1] == 3
        assert np.flatnonzero(ends).tolist() == [len(first)]
        read = [word for word, mine in zip(followed, own, strict=True) if not mine]
        assert tuple(read) in conversations.OBSERVATIONS
    # Of each answered turn and last turn the two observations are all there is.
    answered = episodes.first >= 0
    total = np.bincount(episodes.first[answered], episodes.chance[answered])
    np.testing.assert_allclose(total, 13.0, rtol=1e-6)
    assert turns.chance_of_all(case) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_rewards_of_first_turns_depend_on_them_alone(case):
    early = np.asarray(case.of_turns.sum(axis=1))
    first = np.asarray(case.episodes.first)
    for number in range(4):
        assert len({*early[first == number].tolist()}) == 1
    assert not early[first < 0].any()
    assert (np.asarray(case.of_turns != 0) <= np.asarray(case.episodes.turn_ends)).all()


@pytest.mark.cases(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_every_loss_has_the_gradient_that_it_is_said_to_have(case, name):
    (finding,) = turns.certify(case, claims=[CLAIMS[name]])
    assert finding.holds, finding


def not_skipping(*, rewards, values, mask, gamma, lam):
    """A wrong GAE that takes an observed column for the end of an episode."""
    values = jnp.where(mask, values, 0.0)
    ahead = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
    deltas = jnp.where(mask, rewards, 0.0) + gamma * ahead - values

    def step(carry, column):
        delta, inside = column
        advantage = jnp.where(inside, delta + gamma * lam * carry, 0.0)
        return advantage, advantage

    columns = deltas.T, mask.T
    _, advantages = jax.lax.scan(step, jnp.zeros(len(mask)), columns, reverse=True)
    return advantages.T, advantages.T + values


@pytest.mark.slow
def test_advantages_that_end_with_a_turn_fail(case, monkeypatch):
    monkeypatch.setattr(loss, "gae", not_skipping)
    (finding,) = turns.certify(case, claims=[CLAIMS["PPO, KL in the reward"]])
    assert finding.error > 0.01


@pytest.mark.slow
def test_rewards_of_turns_that_land_at_the_end_fail_with_a_discount(case):
    claim = CLAIMS["PPO, discounted per sampled token"]
    (finding,) = turns.certify(case, claims=[claim._replace(turns=False)])
    assert finding.error > 0.01


@pytest.mark.slow
def test_without_a_discount_rewards_to_go_have_the_gradient_of_the_objective(case):
    to_go = turns.expected_to_go(case, gamma=1.0)
    np.testing.assert_allclose(
        to_go, turns.expected(case, beta=turns.BETA), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_another_share_fails(case):
    claim = CLAIMS["REINFORCE, KL in the reward"]
    (finding,) = turns.certify(case, claims=[claim._replace(share=0.5)])
    assert not finding.holds
    # What is right is not biased.
    assert not finding._replace(error=1e-7, claim=claim._replace(share=None)).holds
