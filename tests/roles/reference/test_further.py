"""References beside the first: what name and weight one may have."""

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import further


@pytest.mark.parametrize("weight", [0.0, 0.5, 3])
def test_a_weight_of_0_or_more_is_taken(weight):
    further.check("code-7b.v2", weight=weight)


@pytest.mark.parametrize("weight", [-0.5, -1e-9, float("nan"), float("inf")])
def test_a_negative_weight_is_refused_with_its_name(weight):
    with pytest.raises(
        InputError, match="of reference code: expected a number of at least 0, got"
    ):
        further.check("code", weight=weight)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "k3", "coef", "exact"])
def test_a_name_that_no_metric_could_have_is_refused(name):
    with pytest.raises(InputError, match="expected a name of letters"):
        further.check(name, weight=1.0)
