"""Weights for another policy's tokens: by loops, and as TRL and verl compute them."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys
from places import FIXTURES

from rlhf_jax import kl_penalty, losses, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.off_policy import importance, mismatch

pytestmark = pytest.mark.usefixtures("strict_dtypes")

RECORDED = dict(np.load(FIXTURES / "sampler_corrections.npz"))
MASK = RECORDED["mask"]
CAP, FLOOR = 2.0, 0.5
KINDS = get_args(importance.Correction)


def weights(correction, *, cap=CAP, floor=FLOOR, mask=MASK, **changed):
    arrays = {
        "logprobs": RECORDED["old_logprobs"],
        "sampler_logprobs": RECORDED["sampler_logprobs"],
    }
    if correction.endswith("truncate"):
        floor = None
    return importance.importance_weights(
        **{**arrays, **changed},
        mask=mask,
        correction=correction,
        cap=cap,
        floor=floor,
    )


@pytest.mark.parametrize("correction", KINDS)
def test_weights_and_what_is_said_of_them_against_loops(correction):
    log_ratio = RECORDED["old_logprobs"] - RECORDED["sampler_logprobs"]
    mask = MASK.copy()
    mask[2] = False  # a response of no token has no weight
    floor = None if correction.endswith("truncate") else FLOOR
    expected, expected_mask = oracles.importance_weights(
        log_ratio, mask, correction, CAP, floor
    )
    output = weights(
        correction,
        mask=mask,
        sampler_logprobs=np.where(mask, RECORDED["sampler_logprobs"], np.inf),
        logprobs=np.where(mask, RECORDED["old_logprobs"], np.nan),
    )
    np.testing.assert_allclose(output.weights, expected, rtol=1e-5)
    np.testing.assert_array_equal(output.mask, expected_mask)
    cut = mask & (expected == (CAP if floor is None else 0.0))
    np.testing.assert_array_equal(output.cut, cut)
    assert 0 < cut.sum() < mask.sum()
    stats = mismatch.weight_stats(output, mask=mask, correction=correction)
    means = masked.mean_stats(stats)
    weights_of_units = expected[mask]
    if not correction.startswith("token"):
        weights_of_units = expected[np.flatnonzero(mask.any(axis=1)), 0]
    assert float(stats["policy/sampler_ess"][1]) == len(weights_of_units)
    for name, value in {
        "policy/sampler_weight": expected[mask].mean(),
        "policy/sampler_weight_capped": cut.sum() / mask.sum(),
        "policy/sampler_ess": oracles.effective_share(weights_of_units),
    }.items():
        assert float(means[name]) == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("correction", KINDS)
def test_of_one_s_own_tokens_every_weight_is_exactly_1(correction):
    bounds = {"cap": 1.0, "floor": 1.0}  # the tightest there are
    output = weights(correction, sampler_logprobs=RECORDED["old_logprobs"], **bounds)
    np.testing.assert_array_equal(output.weights, np.ones(MASK.shape))
    np.testing.assert_array_equal(output.mask, MASK)
    at_cap = MASK & correction.endswith("truncate")  # which changes nothing
    np.testing.assert_array_equal(output.cut, at_cap)
    stats = mismatch.weight_stats(output, mask=MASK, correction=correction)
    assert float(masked.mean_stats(stats)["policy/sampler_ess"]) == 1.0


def test_weights_are_those_of_trl_and_verl():
    def agree(correction, recorded):
        ours = np.where(MASK, weights(correction).weights, 0.0)
        theirs = np.where(MASK, RECORDED[recorded], 0.0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

    for level in ("token", "sequence"):
        agree(f"{level}_truncate", f"trl/{level}_truncate/weights")
        agree(f"{level}_mask", f"trl/{level}_mask/weights")
        agree(f"{level}_truncate", f"verl/{level}/{CAP}")
        agree(f"{level}_mask", f"verl/{level}/{FLOOR}_{CAP}")
    for ours, theirs in (
        ("sequence_reject", "verl/reject/seq_sum_k1"),
        ("geometric_reject", "verl/reject/seq_mean_k1"),
    ):
        np.testing.assert_array_equal(weights(ours).mask, RECORDED[theirs])
    stats = mismatch.weight_stats(
        weights("token_truncate"), mask=MASK, correction="token_truncate"
    )
    ess = float(masked.mean_stats(stats)["policy/sampler_ess"])
    assert ess == pytest.approx(RECORDED["verl/ess"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("correction", KINDS[:4])
def test_losses_and_gradients_are_those_of_trl(correction):
    """We weight advantages and TRL weights losses, which is equal for w >= 0."""
    advantages = weights(correction).weights * RECORDED["advantages"][:, None]

    def loss(logprobs):
        return losses.policy_loss(
            logprobs=logprobs,
            old_logprobs=RECORDED["old_logprobs"],
            advantages=advantages,
            mask=MASK,
            clip_range=0.2,
            clip_range_high=0.28,
        )[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(RECORDED["logprobs"]))
    assert float(value) == pytest.approx(RECORDED[f"trl/{correction}/loss"], abs=1e-6)
    theirs = RECORDED[f"trl/{correction}/gradient"]
    np.testing.assert_allclose(gradient, theirs, atol=1e-6)


def test_the_unbiased_k3_is_trl_s_whose_ratio_is_differentiated():
    @toys.jit
    @jax.value_and_grad
    def ours(logprobs):
        return kl_penalty.kl_loss(
            penalty=kl_penalty.UNBIASED_K3,
            logprobs=logprobs,
            old_logprobs=jnp.asarray(RECORDED["old_logprobs"]),
            ref_logprobs=jnp.asarray(RECORDED["ref_logprobs"]),
            mask=jnp.asarray(MASK),
            weights=losses.token_weights(jnp.asarray(MASK)),
        )[0]

    value, gradient = ours(RECORDED["logprobs"])
    assert float(value) == pytest.approx(RECORDED["trl/kl/loss"], rel=1e-5)
    np.testing.assert_allclose(gradient, RECORDED["trl/kl/gradient"], atol=1e-6)
    ratio = np.exp(RECORDED["logprobs"] - RECORDED["old_logprobs"])
    x = RECORDED["logprobs"] - RECORDED["ref_logprobs"]
    expected = np.where(MASK, ratio * x / MASK.sum(), 0.0)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert kl_penalty.UNBIASED_K3.gradient == "fixed-state reverse"
    assert kl_penalty.UNBIASED_K3.warning is None


def test_ratios_far_beyond_float32():
    sampler, trainer = np.full((2, *MASK.shape), -1.0, np.float32)
    sampler[0, 0] = trainer[:2, 1] = -300.0
    mask = np.zeros(MASK.shape, bool)
    mask[:2, :2] = True
    arrays = {"logprobs": trainer, "sampler_logprobs": sampler, "mask": mask}
    for kind, expected in {
        "token_truncate": [[1e30, 0], [1, 0]],
        "token_mask": [[0, 0], [1, 0]],
        "sequence_truncate": [[1, 1], [0, 0]],
        "sequence_mask": [[1, 1], [0, 0]],
        "geometric_reject": [[1, 1], [1, 1]],
    }.items():
        output = weights(kind, cap=1e30, floor=None, **arrays)
        np.testing.assert_allclose(output.weights[:2, :2], expected, rtol=1e-4)
        stats = mismatch.weight_stats(output, mask=mask, correction=kind)
        share = {"token_mask": 1 / 4, "token_truncate": 1 / 4}.get(kind)
        if share is not None:  # one weight counts, as its square is not infinite
            ess = float(masked.mean_stats(stats)["policy/sampler_ess"])
            assert ess == pytest.approx(share)
    nothing = importance.Weights(0.0 * trainer, mask & False, mask)
    stats = mismatch.weight_stats(nothing, mask=mask, correction="sequence_reject")
    assert float(masked.mean_stats(stats)["policy/sampler_ess"]) == 0.0


def test_the_kl_of_the_sampler_against_loops():
    arrays = {
        "logprobs": np.where(MASK, RECORDED["old_logprobs"], np.inf),
        "sampler_logprobs": np.where(MASK, RECORDED["sampler_logprobs"], np.inf),
    }
    means = masked.mean_stats(mismatch.sampler_kl(**arrays, mask=MASK))
    pair = RECORDED["sampler_logprobs"], RECORDED["old_logprobs"]
    for name, of in (("kl", oracles.k1), ("kl_k3", oracles.k3)):
        expected = oracles.masked_mean(of(*pair), MASK)
        assert float(means[f"policy/sampler_{name}"]) == pytest.approx(expected, 1e-5)


def test_no_gradient_reaches_the_weights():
    def total(logprobs):
        return weights("sequence_truncate", logprobs=logprobs).weights.sum()

    slope = jax.grad(total)(jnp.asarray(RECORDED["old_logprobs"]))
    np.testing.assert_array_equal(slope, 0.0)


@pytest.mark.parametrize(
    ("correction", "bounds", "message"),
    [
        ("token_reject", {}, r"correction: expected one of 'token_truncate'"),
        ("token_mask", {"cap": 0.9}, "cap: expected a number of at least 1"),
        (
            "token_mask",
            {"cap": np.inf},
            "cap: expected a number .* got inf",
        ),
        ("token_mask", {"floor": 0.0}, "floor: expected a number above"),
        ("token_mask", {"floor": 1.1}, "floor: expected a number above"),
    ],
)
def test_what_is_refused(correction, bounds, message):
    with pytest.raises(InputError, match=message):
        weights(correction, **bounds)


def test_a_truncation_has_no_floor_and_arrays_have_one_shape():
    with pytest.raises(InputError, match="expected none with 'sequence_truncate'"):
        importance.check_bounds("sequence_truncate", cap=2.0, floor=0.5)
    with pytest.raises(ValueError, match="logprobs"):
        weights("token_mask", mask=MASK[:4])
    with pytest.raises(TypeError, match="mask"):
        weights("token_mask", mask=MASK.astype(np.int32))
    with pytest.raises(TypeError, match="logprobs"):
        weights("token_mask", logprobs=RECORDED["old_logprobs"].astype(np.float16))
    with pytest.raises(ValueError, match="weights"):
        mismatch.weight_stats(
            weights("token_mask"), mask=MASK[:, :1], correction="token_mask"
        )
