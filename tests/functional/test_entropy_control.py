"""The coefficient of an entropy bonus with a target, against a loop and by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from places import FIXTURES

from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.entropy_control import controlled

pytestmark = pytest.mark.usefixtures("strict_dtypes")

OPTIONS = {"target": 0.5, "increment": 0.01, "largest": 0.03}


def test_coefficients_are_those_of_a_loop():
    """At and below the target they rise to the bound; above it they fall to 0."""
    entropies = np.float32([0.4, 0.5, 0.3, 0.2, 0.1, 0.51, 0.4, 0.9, 0.8, 0.7, 0.6])
    coef, expected, found = 0.005, [], []
    ours = jnp.float32(coef)
    for entropy in entropies:
        low = entropy <= 0.5
        applied = coef if low else 0.0
        coef = min(max(coef + (0.01 if low else -0.01), 0.0), 0.03)
        expected.append((applied, coef))
        applied, ours = controlled(ours, entropy=jnp.float32(entropy), **OPTIONS)
        found.append((float(applied), float(ours)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)
    assert {applied for applied, _ in expected} > {0.0, 0.03}


def test_coefficients_are_trl_s():
    recorded = np.load(FIXTURES / "regularisers.npz")
    coef, coefs = jnp.float32(0.005), []
    for entropy in recorded["entropies"]:
        _, coef = controlled(coef, entropy=jnp.asarray(entropy), **OPTIONS)
        coefs.append(float(coef))
    np.testing.assert_allclose(coefs, recorded["entropy_coefs"], atol=1e-6)
    assert {0.03, 0.0} < {round(x, 6) for x in coefs}


def test_a_batch_without_an_entropy_changes_nothing():
    applied, coef = controlled(
        jnp.float32(0.02), entropy=jnp.float32(jnp.nan), **OPTIONS
    )
    assert (float(applied), float(coef)) == (0.0, np.float32(0.02))


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_no_number_above_0_is_refused(name):
    with pytest.raises(InputError, match=f"{name}: expected a finite number above 0"):
        controlled(jnp.float32(0.0), entropy=jnp.float32(1.0), **OPTIONS | {name: 0.0})
