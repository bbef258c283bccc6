"""DPPO, GMPO, VESPO, TOPR and the mask of responses: loops, by hand, TRL and verl."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from places import FIXTURES

from rlhf_jax import losses, masked
from rlhf_jax.functional import policy_losses
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes")

LENGTHS = (6, 1, 3, 4, 2, 5, 6, 3)
MASK = np.arange(6)[None, :] < np.array(LENGTHS)[:, None]
RNG = np.random.default_rng(7)
OLD = -np.abs(RNG.normal(0, 1.2, MASK.shape))
NOW = np.minimum(OLD + RNG.normal(0, 0.35, MASK.shape), -1e-3)
ADVANTAGES = np.broadcast_to(RNG.normal(0, 1, (8, 1)), MASK.shape)
ARRAYS = {
    "old_logprobs": OLD.astype(np.float32),
    "advantages": ADVANTAGES.astype(np.float32),
}
DPPO = functools.partial(policy_losses.dppo_loss, cap=1.4)
LOSSES = {
    "dppo tv": functools.partial(
        DPPO, divergence="tv", threshold=0.05, threshold_high=0.1
    ),
    "dppo kl": functools.partial(
        DPPO, divergence="kl", threshold=0.01, threshold_high=0.02
    ),
    "gmpo": functools.partial(
        policy_losses.gmpo_loss, clip_range=0.15, clip_range_high=0.25
    ),
    "vespo": functools.partial(
        policy_losses.vespo_loss,
        power=2.0,
        decay=3.0,
        negative_power=3.5,
        negative_decay=1.5,
    ),
    "topr": policy_losses.topr_loss,
}


def differentiated(loss, logprobs=NOW, **options):
    def value(logprobs):
        return loss(logprobs=logprobs, **{**ARRAYS, "mask": MASK, **options})[0]

    return jax.value_and_grad(value)(jnp.asarray(logprobs, jnp.float32))


def columns(b):
    return range(LENGTHS[b])


@pytest.mark.parametrize("name", ["dppo tv", "gmpo"])
def test_without_a_bound_above_it_is_the_bound_below(name):
    high = "threshold_high" if name == "dppo tv" else "clip_range_high"
    low = LOSSES[name].keywords[high.removesuffix("_high")]
    # Of the other sign, where ratios are beyond both bounds.
    options = {"advantages": -ARRAYS["advantages"]}
    for output, expected in zip(
        differentiated(LOSSES[name], **options, **{high: None}),
        differentiated(LOSSES[name], **options, **{high: low}),
        strict=True,
    ):
        np.testing.assert_array_equal(output, expected)


def whole(b):
    """The probability ratio of a whole response."""
    return math.exp(math.fsum(NOW[b, t] - OLD[b, t] for t in columns(b)))


def dppo(b, t, kind):
    """The weight of a token, from its probability before and after."""
    now, old = math.exp(NOW[b, t]), math.exp(OLD[b, t])
    low, high = {"tv": (0.05, 0.1), "kl": (0.01, 0.02)}[kind]
    distance = {
        "tv": abs(now - old),
        "kl": old * math.log(old / now) + (1 - old) * math.log((1 - old) / (1 - now)),
    }[kind]
    if ADVANTAGES[b, t] > 0:
        left_out = now > old and distance > high
    else:
        left_out = now < old and distance > low
    return 0.0 if left_out else min(now / old, 1.4)


def gmpo(b, t):
    """The ratio of the response, 0 if the token's own ratio is clipped."""

    def clipped(s):
        x = NOW[b, s] - OLD[b, s]
        return min(x, 0.25) if ADVANTAGES[b, s] > 0 else max(x, -0.15)

    mean = math.fsum(clipped(s) for s in columns(b)) / LENGTHS[b]
    free = clipped(t) == NOW[b, t] - OLD[b, t]
    return math.exp(mean) if free else 0.0


def vespo(b, t):
    ratio = whole(b)
    power, decay = (2.0, 3.0) if ADVANTAGES[b, t] > 0 else (3.5, 1.5)
    return ratio**power * math.exp(decay * (1 - ratio))


def topr(b, t):
    return 1.0 if ADVANTAGES[b, t] >= 0 else min(whole(b), 1.0)


RECORDED = dict(np.load(FIXTURES / "policy_losses.npz"))
BY_RESPONSE = {"aggregation": "sequence_mean"}
# Of TRL and of verl, whose bounds are those of LOSSES.
PUBLISHED = {
    "luspo": (
        functools.partial(
            losses.policy_loss,
            clip_range=0.02,
            clip_range_high=0.05,
            ratio_level="sequence",
        ),
        {"aggregation": "constant", "loss_scale_factor": 1.0},
    ),
    "vespo": (
        functools.partial(
            policy_losses.vespo_loss,
            power=2.0,
            decay=3.0,
            negative_power=3.0,
            negative_decay=2.0,
        ),
        {},
    ),
    "dppo_tv": (LOSSES["dppo tv"], {}),
    "dppo_kl": (LOSSES["dppo kl"], {}),
    "gmpo": (LOSSES["gmpo"], BY_RESPONSE),
}


def recorded():
    """The inputs in the form that a surrogate reads."""
    names = ("logprobs", "old_logprobs", "mask")
    arrays = {name: jnp.asarray(RECORDED[name]) for name in names}
    advantages = np.broadcast_to(RECORDED["advantages"][:, None], MASK.shape)
    return arrays | {"advantages": jnp.asarray(advantages)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_and_gradients_are_those_of_trl_and_verl(name):
    loss, options = PUBLISHED[name]
    value, gradient = differentiated(loss, **recorded(), **options)
    assert float(value) == pytest.approx(RECORDED[f"{name}/loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, RECORDED[f"{name}/gradient"], atol=1e-6)


def test_the_mask_of_responses_is_trl_s():
    arrays = recorded()
    kept = policy_losses.off_policy_mask(**arrays, threshold=0.02)
    arrays["advantages"] = jnp.where(kept, arrays["advantages"], 0.0)
    plain = functools.partial(losses.policy_loss, clip_range=0.2)
    value, gradient = differentiated(plain, **arrays)
    name = "off_policy_mask"
    assert float(value) == pytest.approx(RECORDED[f"{name}/loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, RECORDED[f"{name}/gradient"], atol=1e-6)
    assert 0 < (~np.asarray(kept)).any(axis=1).sum() < 8


WEIGHTS = {
    "dppo tv": functools.partial(dppo, kind="tv"),
    "dppo kl": functools.partial(dppo, kind="kl"),
    "gmpo": gmpo,
    "vespo": vespo,
    "topr": topr,
}


def weights(name):
    """f64[B, S], 0 outside the mask."""
    output = np.zeros(MASK.shape)
    for b, t in oracles.entries(MASK):
        output[b, t] = WEIGHTS[name](b, t)
    return output


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_a_loop(name):
    """-w·A/N per token, where N counts all tokens, or responses times lengths."""
    per_token = weights(name)
    if name == "gmpo":  # every token of a response has the response's loss
        shares = np.array([[1 / 8 / length] for length in LENGTHS])
        expected = -per_token * ADVANTAGES * shares
        _, gradient = differentiated(LOSSES[name], aggregation="sequence_mean")
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-7)
    _, gradient = differentiated(LOSSES[name])
    expected = -per_token * ADVANTAGES / MASK.sum()
    np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-7)
    assert len(np.unique(np.round(per_token[MASK], 6))) > 3  # bounds bite and do not


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_reported(name):
    _, stats = LOSSES[name](logprobs=NOW.astype(np.float32), mask=MASK, **ARRAYS)
    means = {key: float(mean) for key, mean in masked.mean_stats(stats).items()}
    tokens = oracles.entries(MASK)
    x = {(b, t): NOW[b, t] - OLD[b, t] for b, t in tokens}
    ratios = {cell: math.exp(value) for cell, value in x.items()}
    if name in ("vespo", "topr"):
        ratios = {(b, t): whole(b) for b, t in tokens}
    if name == "gmpo":

        def mean(b):
            a = ADVANTAGES[b, 0]
            clipped = [
                min(x[b, t], 0.25) if a > 0 else max(x[b, t], -0.15) for t in columns(b)
            ]
            return math.exp(math.fsum(clipped) / LENGTHS[b])

        ratios = {(b, t): mean(b) for b, t in tokens}
    expected = {
        "policy/approxkl": np.mean([value**2 / 2 for value in x.values()]),
        "policy/ratio_mean": np.mean([*ratios.values()]),
        "policy/ratio_max": max(ratios.values()),
    }
    per_token = weights(name)[MASK]
    cut = {
        "dppo tv": per_token == 0,
        "dppo kl": per_token == 0,
        "gmpo": per_token == 0,
        "topr": [ADVANTAGES[b, t] < 0 and whole(b) > 1 for b, t in tokens],
    }
    if name in cut:
        expected["policy/clipfrac"] = np.mean(cut[name])
        assert 0 < expected["policy/clipfrac"] < 1
    else:
        expected["policy/gate"] = per_token.mean()
    del means["loss/policy"]
    assert means == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_on_the_sampler_s_policy_it_is_the_policy_gradient(name):
    _, gradient = differentiated(LOSSES[name], OLD)
    expected = np.where(MASK, -ADVANTAGES / MASK.sum(), 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_under_the_mask_and_in_other_parts_changes_nothing(name):
    value, gradient = differentiated(LOSSES[name])
    counts = {"num_tokens": jnp.float32(MASK.sum()), "num_responses": jnp.float32(8)}
    dirty = {
        key: np.where(MASK, array, np.nan).astype(np.float32)
        for key, array in {**ARRAYS, "logprobs": NOW}.items()
    }
    parts = [
        differentiated(
            LOSSES[name],
            mask=MASK[rows],
            **{key: array[rows] for key, array in dirty.items()},
            **counts,
        )
        for rows in (slice(0, 4), slice(4, 8))
    ]
    assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(value), rel=1e-5)
    joined = np.concatenate([part[1] for part in parts])
    np.testing.assert_allclose(joined, gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shift", [-300.0, 30.0, 300.0])
def test_ratios_far_beyond_float32_leave_everything_finite(name, shift):
    old = ARRAYS["old_logprobs"] - np.float32(abs(shift)) * (shift > 0)
    now = old + np.float32(shift)
    value, gradient = differentiated(LOSSES[name], now, old_logprobs=old)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    if name == "vespo":  # φ is 0 on both sides
        np.testing.assert_array_equal(gradient, 0.0)


def test_a_certain_token_has_a_divergence():
    """π = 1 or μ = 1, for which log(1 - π) or log(1 - μ) is -inf."""
    loss = functools.partial(DPPO, divergence="kl", threshold=0.05, threshold_high=0.05)
    arrays = {
        "old_logprobs": jnp.log(jnp.array([[0.5, 1.0, 1.0]])),
        "advantages": jnp.array([[1.0, -1.0, 1.0]]),
        "mask": jnp.ones((1, 3), bool),
    }
    _, gradient = differentiated(
        loss, np.log([[1.0, 0.5, 1.0]]), **arrays
    )  # infinite, log 2, and 0
    np.testing.assert_allclose(gradient, [[0, 0, -1 / 3]], atol=1e-6)


def test_a_move_back_is_never_left_out():
    """However far the token is, its advantage pulls it back."""
    for kind in ("tv", "kl"):
        loss = functools.partial(
            DPPO, divergence=kind, threshold=1e-3, threshold_high=1e-3
        )
        arrays = {
            "old_logprobs": jnp.log(jnp.array([[0.9, 0.1]])),
            "advantages": jnp.array([[1.0, -1.0]]),
            "mask": jnp.ones((1, 2), bool),
        }
        _, gradient = differentiated(loss, np.log([[0.1, 0.9]]), **arrays)
        np.testing.assert_allclose(gradient, [[-1 / 18, 0.7]], rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_of_weight_0_changes_no_other_token_s_loss(name):
    """Its ratio still counts in the response's, clipped by the response's sign."""
    weights = (np.arange(MASK.shape[1]) % 3 > 0).astype(np.float32)

    def loss(advantages):
        arrays = {**ARRAYS, "advantages": advantages, "mask": MASK}
        return float(LOSSES[name](logprobs=NOW.astype(np.float32), **arrays)[0])

    advantages = ARRAYS["advantages"]
    parts = [loss(advantages * weight) for weight in (weights, 1 - weights)]
    assert sum(parts) == pytest.approx(loss(advantages), rel=1e-5)


def test_the_mask_of_responses_against_a_loop():
    kept = policy_losses.off_policy_mask(
        logprobs=NOW.astype(np.float32), mask=MASK, threshold=0.01, **ARRAYS
    )
    expected = np.ones(MASK.shape, bool)
    for b in range(8):
        mean = math.fsum(OLD[b, t] - NOW[b, t] for t in columns(b)) / LENGTHS[b]
        if ADVANTAGES[b, 0] < 0 and mean > 0.01:
            expected[b, : LENGTHS[b]] = False
    np.testing.assert_array_equal(kept, expected)
    left_out = ~expected.all(axis=1)
    worse = ADVANTAGES[:, 0] < 0
    assert 0 < left_out.sum() < worse.sum()


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_but_the_log_probs_has_a_gradient(name):
    def value(arrays):
        return LOSSES[name](logprobs=NOW.astype(np.float32), mask=MASK, **arrays)[0]

    for key, gradient in jax.grad(value)(jax.tree.map(jnp.asarray, ARRAYS)).items():
        assert not gradient.any(), key


def test_what_does_not_fit_is_refused():
    arrays = {**ARRAYS, "logprobs": NOW.astype(np.float32), "mask": MASK}
    bounds = {"threshold": 0.1, "threshold_high": 0.1}
    with pytest.raises(InputError, match="divergence: expected one of 'tv', 'kl'"):
        DPPO(**arrays, divergence="js", **bounds)
    with pytest.raises(InputError, match="cap: expected a number above 1"):
        DPPO(**arrays, divergence="tv", **bounds | {"cap": 1.0})
    with pytest.raises(InputError, match=r"threshold: expected .* above 0"):
        policy_losses.off_policy_mask(**arrays, threshold=0.0)
    with pytest.raises(ValueError, match="mask"):
        policy_losses.topr_loss(**arrays | {"mask": MASK[:4]})
    flat = {key: array[0] for key, array in arrays.items()}
    for loss in (policy_losses.topr_loss, LOSSES["vespo"], LOSSES["gmpo"]):
        with pytest.raises(ValueError, match="mask"):  # responses need rows
            loss(**flat)
