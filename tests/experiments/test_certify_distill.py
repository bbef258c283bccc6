"""Distillation by enumeration: its gradients and its optimum, the teacher."""

import numpy as np
import pytest
from certificates import certify_distill
from certificates.certify_distill import CLAIMS, DIVERGENCES, Config

from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.long
@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(claim, marks=[pytest.mark.long] * (number not in (2, 5)))
        for number, claim in enumerate(CLAIMS)
    ],
    ids=lambda claim: claim.name,
)
def test_a_gradient_is_of_what_is_said_and_of_nothing_else(claim):
    error = certify_distill.gradient_error(claim, seed=4, hidden_size=8)
    assert error <= certify_distill.TOLERANCE
    other = CLAIMS[(CLAIMS.index(claim) + 1) % len(CLAIMS)]
    wrong = claim._replace(value=other.value)
    assert certify_distill.gradient_error(wrong, seed=4, hidden_size=8) > 1e-3


@pytest.mark.slow
def test_the_gradient_of_a_group_s_successes_is_given_them():
    error = certify_distill.successes_error(seed=4, hidden_size=8, count=2)
    assert error <= certify_distill.TOLERANCE


@pytest.mark.long
def test_a_student_comes_to_its_teacher(tmp_path):
    options = Config(out=tmp_path, iterations=250, hidden_size=16, batch_size=64)
    distances = certify_distill.reach(options, DIVERGENCES["reverse"], seed=0)
    assert distances[0] > certify_distill.FARTHEST
    assert distances[-1] < 0.02 * distances[0]
    assert np.isfinite(distances).all()


def test_no_world_is_refused(tmp_path):
    with pytest.raises(InputError, match="num_worlds"):
        Config(out=tmp_path, num_worlds=0)
