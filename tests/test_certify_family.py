"""Estimators over groups by enumeration, and what they make of a policy."""

import certified_gradients
import certified_groups
import certify_family
import numpy as np
import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runtime import cli

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def case():
    return certified_gradients.draw(0, hidden_size=8)


@pytest.fixture(scope="module")
def rewards():
    return np.random.default_rng(4).normal(size=256)


@pytest.mark.long
def test_estimators_have_the_gradients_they_are_said_to_have(
    case, rewards, monkeypatch
):
    """Three of those that `certify_family.py` goes through."""
    chosen = [certified_groups.CLAIMS[number] for number in (1, 5, -1)]
    monkeypatch.setattr(certified_groups, "CLAIMS", chosen)
    rloo, k2, published = certified_groups.certify(case, rewards)
    for finding in (rloo, k2, published):
        assert finding.holds, finding
    assert rloo.cosine > 1 - 1e-6
    assert published.claim.bias
    assert published.cosine < 0.999


@pytest.mark.long
def test_a_wrong_claim_fails(case, rewards, monkeypatch):
    right = certified_groups.CLAIMS[1]
    wrong = [right._replace(share=0.9)]
    monkeypatch.setattr(certified_groups, "CLAIMS", wrong)
    assert not any(each.holds for each in certified_groups.certify(case, rewards))


def play(out, *argv):
    words = ["--out", str(out), "--no-progress", *argv]
    cli.main(certify_family.main, certify_family.Config, description="", argv=words)


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
    ("options", "told"),
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
def test_what_cannot_be_certified_is_refused(tmp_path, options, told):
    with pytest.raises(InputError, match=told):
        certify_family.Config(out=tmp_path, **options)
