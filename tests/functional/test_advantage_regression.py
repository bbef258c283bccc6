"""DAR: its weight and its gradient against a loop, and invariances."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.policy_losses import dar_loss

pytestmark = pytest.mark.usefixtures("strict_dtypes")

LENGTHS = (6, 1, 3, 4, 2, 5, 6, 3)
MASK = np.arange(6)[None, :] < np.array(LENGTHS)[:, None]
RNG = np.random.default_rng(11)
OLD, NOW, REF = (-np.abs(RNG.normal(0, 1.2, MASK.shape)) for _ in range(3))
ADVANTAGES = np.broadcast_to(RNG.normal(0, 1, (8, 1)), MASK.shape)
ARRAYS = {
    "old_logprobs": OLD.astype(np.float32),
    "ref_logprobs": REF.astype(np.float32),
    "advantages": ADVANTAGES.astype(np.float32),
}
BETA, SHARE, CAP = 0.4, 0.3, 5.0
LOSS = functools.partial(dar_loss, beta=BETA, share=SHARE, cap=CAP)


def differentiated(logprobs=NOW, **options):
    def value(logprobs):
        return LOSS(logprobs=logprobs, **{**ARRAYS, "mask": MASK, **options})[0]

    return jax.value_and_grad(value)(jnp.asarray(logprobs, jnp.float32))


def weight(b, t):
    """min((π_ref/π_old)^α·exp(A/β), cap), with the ratio of the whole response."""
    back = math.fsum(REF[b, s] - OLD[b, s] for s in range(LENGTHS[b]))
    return min(math.exp(SHARE * back + ADVANTAGES[b, t] / BETA), CAP)


def weights():
    output = np.zeros(MASK.shape)
    for b, t in oracles.entries(MASK):
        output[b, t] = weight(b, t)
    return output


def test_the_loss_and_its_gradient_are_those_of_a_loop():
    """-w·log π, in means over tokens and over responses."""
    own = weights()
    assert 0 < (own == CAP).sum() < MASK.sum()
    for aggregation, shares in (
        ("token_mean", np.full(MASK.shape, 1 / MASK.sum())),
        ("sequence_mean", np.array([[1 / 8 / length] for length in LENGTHS])),
    ):
        value, gradient = differentiated(aggregation=aggregation)
        np.testing.assert_allclose(gradient, -own * shares, rtol=2e-5, atol=1e-8)
        assert float(value) == pytest.approx(-(own * shares * NOW).sum(), rel=2e-5)


def test_what_is_reported():
    _, stats = LOSS(logprobs=NOW.astype(np.float32), mask=MASK, **ARRAYS)
    means = {key: float(mean) for key, mean in masked.mean_stats(stats).items()}
    x = (NOW - OLD)[MASK]
    del means["loss/policy"]
    assert means == pytest.approx(
        {
            "policy/approxkl": np.mean(x**2 / 2),
            "policy/ratio_mean": np.exp(x).mean(),
            "policy/ratio_max": np.exp(x).max(),
            "policy/gate": weights()[MASK].mean(),
            "policy/clipfrac": (weights()[MASK] == CAP).mean(),
        },
        rel=2e-5,
    )


def test_the_optimum_of_the_mixture_is_a_fixed_point():
    """Responses of one token: at r = αβ·log(π/π_ref) all weights are equal."""
    policy, reference = (
        np.exp(x) / np.exp(x).sum()
        for x in np.random.default_rng(0).normal(size=(2, 5))
    )
    rewards = SHARE * BETA * np.log(policy / reference)
    rows = {"old_logprobs": policy, "ref_logprobs": reference}
    arrays = {key: np.log(x)[:, None].astype(np.float32) for key, x in rows.items()}
    arrays |= {"mask": np.ones((5, 1), bool)}
    arrays |= {"advantages": rewards[:, None].astype(np.float32)}
    _, gradient = differentiated(np.log(policy)[:, None], **arrays)
    expected = np.asarray(gradient)[:, 0] * policy  # Σ_y π(y)·∂L/∂log π(y)·∇log π
    np.testing.assert_allclose(expected / policy, expected.sum(), rtol=1e-5)
    arrays["advantages"] = arrays["advantages"] * 2
    _, gradient = differentiated(np.log(policy)[:, None], **arrays)
    assert np.ptp(np.asarray(gradient)) > 0.01


def test_what_is_under_the_mask_and_in_other_parts_changes_nothing():
    value, gradient = differentiated()
    counts = {"num_tokens": jnp.float32(MASK.sum()), "num_responses": jnp.float32(8)}
    dirty = {
        key: np.where(MASK, array, np.nan).astype(np.float32)
        for key, array in {**ARRAYS, "logprobs": NOW}.items()
    }
    parts = [
        differentiated(
            mask=MASK[rows], **{key: x[rows] for key, x in dirty.items()}, **counts
        )
        for rows in (slice(0, 3), slice(3, 8))
    ]
    assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(value), rel=1e-5)
    joined = np.concatenate([part[1] for part in parts])
    np.testing.assert_allclose(joined, gradient, rtol=1e-5, atol=1e-9)


def test_nothing_but_the_log_probs_has_a_gradient():
    def value(arrays):
        return LOSS(logprobs=NOW.astype(np.float32), mask=MASK, **arrays)[0]

    for key, gradient in jax.grad(value)(jax.tree.map(jnp.asarray, ARRAYS)).items():
        assert not gradient.any(), key


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_weights_far_beyond_float32_are_0_or_the_cap(shift):
    ref = ARRAYS["ref_logprobs"] + np.float32(shift)
    _, gradient = differentiated(ref_logprobs=ref)
    expected = -CAP / MASK.sum() if shift > 0 else 0.0
    np.testing.assert_allclose(np.asarray(gradient)[MASK], expected, rtol=1e-5)


def test_what_does_not_fit_is_refused():
    arrays = {**ARRAYS, "logprobs": NOW.astype(np.float32), "mask": MASK}
    for options, message in (
        ({"beta": 0.0}, "beta: expected a finite number above 0"),
        ({"share": 1.5}, "share: expected a number from 0 to 1"),
        ({"cap": 1.0}, "cap: expected a number above 1"),
    ):
        with pytest.raises(InputError, match=message):
            LOSS(**arrays, **options)
    with pytest.raises(ValueError, match="ref_logprobs"):
        LOSS(**arrays | {"ref_logprobs": ARRAYS["ref_logprobs"][:4]})
