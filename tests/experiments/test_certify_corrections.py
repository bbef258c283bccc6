"""Off-policy corrections by enumeration, on samples of an older policy."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from certificates import cases, certify_corrections
from certificates.corrections import claims, gradients
from worlds import enumerable

from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")

CLAIMS = {claim.name: claim for claim in claims.CLAIMS}
UNBOUNDED = CLAIMS["sequence ratio without a bound"]


@pytest.fixture(scope="module")
def case():
    return cases.draw(0, hidden_size=8, stop_ids=enumerable.STOPS)


def certified(case, *chosen):
    count = len(enumerable.every_tokens(case.stop_ids))
    rewards = np.random.default_rng(4).normal(size=count)
    return list(gradients.certify(case, rewards, claims=chosen))


@pytest.mark.long
@pytest.mark.slow
def test_the_ratio_of_a_response_has_the_gradient_of_the_reward(case):
    (finding,) = certified(case, UNBOUNDED)
    assert finding.holds, finding
    assert finding.stale[-1].cosine == pytest.approx(1, abs=1e-6)
    assert finding.at_optimum < 1e-5
    # Nothing beside ∇E[r] is left that a bias could be, and no bound acts.
    for wrong in ({"bias": "none"}, {"bounded": True}):
        assert not finding._replace(claim=UNBOUNDED._replace(**wrong)).holds


@pytest.mark.slow
def test_a_weighted_square_of_responses_has_the_gradient_of_their_kl(case):
    """At each staleness; without the weight, one update already makes a bias."""
    weighted, plain = certified(
        case, *(claim for name, claim in CLAIMS.items() if name.startswith("k2 of"))
    )
    assert weighted.holds, weighted
    assert [stale.updates for stale in weighted.stale] == [0, 1, 2, 4]
    assert plain.holds, plain
    assert plain.stale[0].outside < 1e-5
    assert all(stale.outside > 1e-3 for stale in plain.stale[1:])


@pytest.mark.slow
def test_centred_scores_follow_the_sampler_s_covariance(case):
    """With all tokens recorded, and with two recorded and the policy's tail."""
    names = ("score centring", "score centring, top 2 of 4")
    for finding in certified(case, *(CLAIMS[name] for name in names)):
        assert finding.holds, finding
        assert finding.stale[0].outside < 1e-5


@pytest.mark.long
def test_another_objective_fails(case):
    wrong = CLAIMS["sequence_mask, 0.7 to 1.5"]._replace(
        objective=claims.expected_reward
    )
    assert not certified(case, wrong)[0].holds


@pytest.mark.long
@pytest.mark.parametrize("name", CLAIMS)
def test_every_correction_follows_its_objective(case, name):
    (finding,) = certified(case, CLAIMS[name])
    assert finding.holds, finding


def world(*, rewards, sampler, ref=0.25):
    """Two responses of one token, with these probabilities under μ."""
    logprobs = jnp.log(jnp.array([[weight, 1, 1, 1] for weight in sampler]))
    ones = jnp.ones((2, 4))
    return claims.Known(
        logprobs,
        jnp.array([[True, False, False, False]] * 2),
        jnp.array(rewards, jnp.float32),
        jnp.log(jnp.full((2, 4), ref)),
        ones,
        jnp.array([[reward, 0, 0, 0] for reward in rewards], jnp.float32),
        ones,
        jnp.array(sampler) @ jnp.array(rewards, jnp.float32) * ones,
        jnp.ones((2, 4), bool),
        jnp.zeros((8, 8)),
    )


@pytest.mark.slow
def test_objectives_by_hand():
    known = world(rewards=[1.0, 3.0], sampler=[0.5, 0.5])  # b = 2
    now = jnp.log(jnp.array([[0.8, 1, 1, 1], [0.2, 1, 1, 1]]))  # ratios 1.6 and 0.4
    assert float(claims.expected_reward(now, known)) == pytest.approx(1.4)
    assert float(claims.likelihood(now, known)) == pytest.approx(
        -0.5 * np.log(0.8) + 0.5 * np.log(0.2)
    )
    cap = functools.partial(claims.truncated, cap=1.2)
    cut = functools.partial(claims.masked, cap=1.2, floor=0.5)
    above = 1.2 + 1.2 * np.log(1.6 / 1.2)
    # Of one token the same: V is b there.
    for objective in (claims.of_responses, claims.of_tokens, claims.centred):
        for h, expected in (
            (claims.itself, -0.5 * 1.6 + 0.5 * 0.4),
            (cap, -0.5 * above + 0.5 * 0.4),
            (cut, -0.5 * 1.2 + 0.5 * 0.5),
        ):
            assert float(objective(now, known, h=h)) == pytest.approx(expected)
    bounds = {"cap": 2.0, "floor": 0.5}  # the first alone is kept, of itself and both
    for mean in (True, False):
        likelihood = claims.kept_likelihood(now, known, **bounds, mean=mean)
        # Beside the second, which is not, it weighs twice: 0.25·2·(1 - 3)·log 0.8.
        assert float(likelihood) == pytest.approx(-np.log(0.8))
    kl = 0.8 * np.log(3.2) + 0.2 * np.log(0.8)
    assert float(claims.reverse_kl(now, known)) == pytest.approx(-kl)
    assert float(claims.full_reverse_kl(now, known)) == pytest.approx(-kl)
    k2 = 0.5 * (np.log(3.2) ** 2 + np.log(0.8) ** 2) / 2
    assert float(claims.drawn_k2(now, known)) == pytest.approx(-k2)
    k3 = [1 / ratio - 1 + np.log(ratio) for ratio in (3.2, 0.8)]
    assert float(claims.drawn_k3(now, known)) == pytest.approx(-np.mean(k3))


def test_no_world_is_refused(tmp_path):
    with pytest.raises(InputError, match="num_worlds"):
        certify_corrections.Config(out=tmp_path, num_worlds=0)
