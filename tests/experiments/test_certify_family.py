"""Group estimators by enumeration: their gradients and the policies they train."""

import numpy as np
import pytest
from certificates import cases, certify_family, group_claims
from certificates.measured import groups
from worlds import enumerable

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module", params=[(), enumerable.STOPS], ids=["4", "1 to 4"])
def case(request):
    """Responses of one length, and responses ended by a stop token."""
    return cases.draw(0, hidden_size=8, stop_ids=request.param)


def certified(case, *claims):
    rows = len(enumerable.every_tokens(case.stop_ids))
    rewards = np.random.default_rng(4).normal(size=rows)
    return list(groups.certify(case, rewards, claims=claims))


CLAIMS = {claim.name: claim for claim in group_claims.CLAIMS}
RLOO = CLAIMS["RLOO, KL in the reward"]


@pytest.mark.long
def test_estimators_have_the_gradients_they_are_said_to_have(case):
    """Checks four of the estimators of `certify_family.py`."""
    rloo, ppo, k2, published = findings = certified(
        case,
        RLOO,
        CLAIMS["PPO, KL in the reward"],
        CLAIMS["GRPO, k2 of responses in the loss"],
        group_claims.CLAIMS[-1],
    )
    for finding in findings:
        assert finding.holds, finding
    assert min(rloo.cosine, ppo.cosine) > 1 - 1e-6
    assert published.claim.bias
    assert published.cosine < 0.999
    if case.stop_ids:
        np.testing.assert_allclose([rloo.depths, ppo.depths], 1, atol=1e-5)
        np.testing.assert_allclose(k2.depths, 0.5, atol=1e-5)


@pytest.mark.long
def test_means_are_biased_where_lengths_differ_alone(case):
    claims = group_claims.means(stops=bool(case.stop_ids))
    by_token, by_response = findings = certified(case, *claims[4:6])
    assert [finding.claim.name[:4] for finding in findings] == ["RLOO", "RLOO"]
    assert by_token.holds
    assert by_response.holds
    if case.stop_ids:
        assert max(finding.cosine for finding in findings) < 0.999
        assert np.ptp(by_response.depths) > 1  # of 4 tokens or of 1
    else:
        assert min(finding.cosine for finding in findings) > 1 - 1e-6


@pytest.mark.long
def test_a_wrong_claim_fails(case):
    assert not any(
        finding.holds for finding in certified(case, RLOO._replace(share=0.9))
    )


def play(out, *argv):
    words = ["--out", str(out), "--no-progress", *argv]
    command_line.main(
        certify_family.main, certify_family.Config, description="", argv=words
    )


@pytest.mark.long
def test_a_policy_that_has_not_learned_fails_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certify_family, "certify_estimators", lambda seed: [])
    with pytest.raises(SystemExit) as stopped:
        play(
            tmp_path / "run",
            *("--num-worlds", "1", "--iterations", "25", "--betas", "0.1"),
            *("--algorithms", "rloo", "--hidden-size", "8", "--batch-size", "64"),
            *("--group-size", "8"),
        )
    assert stopped.value.code == 1
    assert "optimum: RLOO, seed 0, beta 0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.1, 1.0)}, "each below the last"),
        ({"betas": (0.005,)}, "exact frontier"),
        ({"iterations": 30}, "a multiple of 25"),
        ({"group_size": 1}, "at least 2"),
        ({"group_size": 100}, "divide the 512 rows"),
        ({"dpo_betas": (0.0,)}, r"dpo_betas\[0\]"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_cannot_be_certified_is_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        certify_family.Config(out=tmp_path, **options)
