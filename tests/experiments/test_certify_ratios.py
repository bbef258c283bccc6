"""Ratios, surrogates and masks by enumeration, on-policy and off-policy."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from certificates import cases, certify_ratios, ratio_claims
from certificates.measured import ratios
from worlds import enumerable

from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")

CLAIMS = {claim.name: claim for claim in ratio_claims.CLAIMS}


@pytest.fixture(scope="module")
def case():
    return cases.draw(0, hidden_size=8, stop_ids=enumerable.STOPS)


def certified(case, *claims):
    count = len(enumerable.every_tokens(case.stop_ids))
    rewards = np.random.default_rng(4).normal(size=count)
    return list(ratios.certify(case, rewards, claims=claims))


@pytest.mark.long
@pytest.mark.slow
def test_the_ratio_of_a_sequence_is_its_formula_s(case):
    claim = CLAIMS["GSPO, a constant divisor (LUSPO)"]
    (finding,) = certified(case, claim)
    assert finding.holds, finding
    fresh, *_, old = finding.stale
    assert fresh.cosine == pytest.approx(1, abs=1e-6)
    assert fresh.ratio == pytest.approx(1)
    assert old.ratio > 1.05
    assert old.cosine < 0.999
    assert finding.at_optimum < 1e-5
    # Nothing beside ∇E[r] is left that a bias could be.
    assert not finding._replace(on_policy=0.0, claim=claim._replace(share=None)).holds


@pytest.mark.long
def test_another_formula_and_another_share_fail(case):
    claim = CLAIMS["GSPO, a constant divisor (LUSPO)"]
    tokens = functools.partial(ratio_claims.clip, low=0.02, high=0.03)
    for wrong in (claim._replace(surrogate=tokens), claim._replace(share=2.0)):
        assert not certified(case, wrong)[0].holds


@pytest.mark.long
@pytest.mark.parametrize("name", CLAIMS)
def test_every_method_is_what_it_is_said_to_be(case, name):
    (finding,) = certified(case, CLAIMS[name])
    assert finding.holds, finding


@pytest.mark.long
def test_mixed_groups_bias_a_kl_in_the_loss(case):
    rewards = np.random.default_rng(4).normal(
        size=len(enumerable.every_tokens(case.stop_ids))
    )
    assert ratios.bias_of_mixed_groups(case, rewards) > 0.01


@pytest.mark.long
def test_gradient_regularisation_is_of_the_surrogate(case):
    rewards = np.random.default_rng(4).normal(
        size=len(enumerable.every_tokens(case.stop_ids))
    )
    error, beside = ratios.of_gradient_penalty(case, rewards)
    assert error < ratios.SLACK < beside


@pytest.mark.slow
def test_formulas_by_hand():
    """At a ratio of 2 and an advantage of 1, and of -1."""
    x = jnp.full((1, 1, 4), np.log(2.0), jnp.float32)
    logprobs, lengths = jnp.full((1, 1, 4), -3.0), jnp.array([4.0])

    def worth(surrogate, advantage):
        number = jnp.full((1, 1, 1), advantage, jnp.float32)
        return float(surrogate(x, logprobs, number, lengths)[0, 0, 0])

    tokens = functools.partial(ratio_claims.clip, low=0.2, high=0.3)
    assert worth(tokens, 1.0) == pytest.approx(1.3)
    assert worth(tokens, -1.0) == pytest.approx(-2)
    sequence = functools.partial(ratio_claims.sequence_clip, low=0.2, high=0.3)
    assert worth(sequence, 1.0) == pytest.approx(1.3)
    assert worth(functools.partial(ratio_claims.weighted, high=0.5), 1.0) == -4.5
    away = {"kind": "tv", "most": 0.02}  # from e^-3/2 = 0.0249 to 0.0498
    divergence = functools.partial(ratio_claims.by_divergence, **away)
    assert worth(divergence, 1.0) == pytest.approx(0)
    assert worth(divergence, -1.0) == pytest.approx(6, rel=1e-6)
    mean = functools.partial(ratio_claims.geometric, most=0.5)
    assert worth(mean, 1.0) == pytest.approx(np.exp(0.5))
    assert worth(mean, -1.0) == pytest.approx(-2)
    assert worth(ratio_claims.soft_weight, 1.0) == pytest.approx(
        -3 * 16**2 * np.exp(-45), rel=1e-5
    )
    assert worth(ratio_claims.tapered, 1.0) == worth(ratio_claims.tapered, -1.0) * -1
    kept = functools.partial(ratio_claims.without_mistakes, most=0.1)
    assert worth(kept, -1.0) == pytest.approx(-2)
    gate = 4 / (1 + np.exp(-1))
    assert worth(ratio_claims.gated, 1.0) == pytest.approx(gate, rel=1e-6)


def test_what_is_beside_a_gradient():
    true = np.array([2.0, 0.0])
    assert ratios.outside(np.array([-3.0, 0.0]), true) == 0
    assert ratios.outside(np.array([3.0, 4.0]), true) == pytest.approx(0.8)


def test_no_world_is_refused(tmp_path):
    with pytest.raises(InputError, match="num_worlds"):
        certify_ratios.Config(out=tmp_path, num_worlds=0)


def test_some_certificates_alone(tmp_path):
    some = cases.chosen(ratio_claims.CLAIMS, only=("DPPO*", "VESPO"))
    assert [claim.name.partition(",")[0] for claim in some] == ["DPPO", "DPPO", "VESPO"]
    assert cases.chosen(ratio_claims.CLAIMS, only=()) == [*ratio_claims.CLAIMS]
    with pytest.raises(InputError, match="--only: expected some of token ratio"):
        certify_ratios.Config(out=tmp_path, only=("DPO",))


@pytest.mark.long
def test_regression_goes_where_it_is_said_to(case):
    rewards = np.random.default_rng(4).normal(
        size=len(enumerable.every_tokens(case.stop_ids))
    )
    assert max(ratios.of_regression(case, rewards)) < ratios.TOLERANCE
