"""Ratios and surrogates: against TRL's trainers, by hand, and where they overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import FIXTURES
from tiers import one_in

from rlhf_jax import advantages, losses, masked
from rlhf_jax.functional import aggregation, surrogates
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes")

RECORDED = dict(np.load(FIXTURES / "trl_policy_gradients.npz"))
MASK, REWARDS = RECORDED["mask"], RECORDED["rewards"]
ARRAYS = {
    "old_logprobs": RECORDED["old_logprobs"],
    "advantages": np.broadcast_to(RECORDED["advantages"][:, None], MASK.shape),
}
PPO = functools.partial(losses.policy_loss, clip_range=0.2)
CISPO = functools.partial(losses.cispo_loss, clip_range=1.0, clip_range_high=0.4)
SAPO = functools.partial(losses.sapo_loss, temperature=1.0, negative_temperature=1.05)
BY_RESPONSE = {"aggregation": "sequence_mean"}
# What TRL calls loss_type, as a function and the options of ours.
TRL = {
    "grpo": (PPO, BY_RESPONSE),
    "grpo_two_sided": (PPO, {"dual_clip": 1.3, **BY_RESPONSE}),
    "gspo": (
        PPO,
        {"clip_range": 0.02, "clip_range_high": 0.05, "ratio_level": "sequence"}
        | BY_RESPONSE,
    ),
    "dapo": (PPO, {"clip_range_high": 0.28}),
    "dr_grpo": (PPO, {"aggregation": "constant", "loss_scale_factor": 6.0}),
    "cispo": (CISPO, {}),  # its epsilon_high is the weight's bound, 1.4
    "sapo": (SAPO, BY_RESPONSE),
}
VARIANTS = {
    "gspo": functools.partial(PPO, ratio_level="sequence"),
    "gspo_token": functools.partial(PPO, ratio_level="sequence_token"),
    "cispo": CISPO,
    "cispo_sequence": functools.partial(CISPO, ratio_level="sequence"),
    "sapo": SAPO,
    "sapo_sequence": functools.partial(SAPO, ratio_level="sequence"),
}


def loss_and_gradient(loss, *, logprobs=RECORDED["logprobs"], **options):
    def value(logprobs):
        return loss(logprobs=logprobs, **{**ARRAYS, "mask": MASK, **options})[0]

    return jax.value_and_grad(value)(jnp.asarray(logprobs))


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("name", TRL)
def test_losses_and_gradients_are_those_of_trl(name):
    loss, options = TRL[name]
    value, gradient = loss_and_gradient(loss, **options)
    assert float(value) == pytest.approx(RECORDED[f"{name}/loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, RECORDED[f"{name}/gradient"], atol=1e-6)


def test_advantages_are_those_of_trl():
    """TRL's eps is 1e-4, and it excludes responses without a score."""
    for name, normalise in {"group": True, "none": False}.items():
        ours = advantages.group_relative(
            REWARDS, group_size=4, normalise=normalise, eps=1e-4
        )
        np.testing.assert_allclose(ours, RECORDED[f"advantages/{name}"], atol=1e-6)
    row_mask = ~RECORDED["left_out"]
    for name, which in {"rloo": None, "rloo_without": row_mask}.items():
        ours = advantages.leave_one_out(REWARDS, group_size=4, row_mask=which)
        np.testing.assert_allclose(ours, RECORDED[f"advantages/{name}"], atol=1e-6)


def test_what_is_not_kept_is_in_no_mean_and_no_deviation():
    scores = jnp.array([1.0, 0.0, 2.0, 9.0, 4.0, 5.0, 6.0, 7.0])
    row_mask = jnp.array([True, True, True, False, True, False, False, False])
    few = {"group_size": 4, "row_mask": row_mask}
    plain = advantages.group_relative(scores, normalise=False, **few)
    np.testing.assert_array_equal(plain, [0, -1, 1, 0, 0, 0, 0, 0])
    scaled = advantages.group_relative(scores, eps=1e-12, **few)
    np.testing.assert_allclose(scaled, [0, -1, 1, 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(advantages.equal_groups(scores, **few), [False, True])
    bad = scores.at[3].set(jnp.nan)
    np.testing.assert_array_equal(
        advantages.leave_one_out(bad, **few)[:4], [0, -1.5, 1.5, 0]
    )
    with pytest.raises(ValueError, match="row_mask"):
        advantages.leave_one_out(scores, group_size=4, row_mask=row_mask[:4])


@pytest.mark.parametrize("name", VARIANTS)
def test_before_any_update_the_gradient_is_the_policy_gradient(name):
    """It equals -A/N to the bit, for any surrogate."""
    _, gradient = loss_and_gradient(VARIANTS[name], logprobs=ARRAYS["old_logprobs"])
    expected = np.where(MASK, -ARRAYS["advantages"] / MASK.sum(), 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, VARIANTS))
def test_garbage_under_the_mask_and_cuts_change_nothing(name):
    loss = VARIANTS[name]
    whole, gradient = loss_and_gradient(loss)
    counts = {"num_tokens": jnp.float32(MASK.sum()), "num_responses": jnp.float32(8)}
    dirty = {
        key: np.where(MASK, array, np.nan).astype(np.float32)
        for key, array in {**ARRAYS, "logprobs": RECORDED["logprobs"]}.items()
    }
    parts = [
        loss_and_gradient(
            loss,
            mask=MASK[rows],
            **{key: array[rows] for key, array in dirty.items()},
            **counts,
        )
        for rows in (slice(0, 4), slice(4, 8))
    ]
    assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(whole), rel=1e-5)
    np.testing.assert_allclose(
        np.concatenate([part[1] for part in parts]), gradient, rtol=1e-5, atol=1e-9
    )


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize(
    ("name", "shift"),
    [
        *((name, -300.0) for name in VARIANTS),
        *((name, 300.0) for name in VARIANTS if name[0] != "g"),
        *((name, 80.0) for name in VARIANTS if name[0] == "g"),  # a sum of e^300 is not
    ],
)
def test_ratios_far_beyond_float32_leave_gradients_finite(name, shift):
    value, gradient = loss_and_gradient(
        VARIANTS[name], logprobs=ARRAYS["old_logprobs"] + np.float32(shift)
    )
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    if name.startswith("sapo"):  # the gate is shut on both sides
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.slow
def test_the_ratio_of_a_sequence_by_hand():
    x = np.array([[0.3, -0.1, 7.0], [0.5, 7.0, 7.0]], np.float32)
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
    for level in ("sequence", "sequence_token"):
        output = surrogates.at_level(x, mask=mask, ratio_level=level)
        np.testing.assert_allclose(output, [[0.1, 0.1, 0], [0.5, 0, 0]], atol=1e-7)
    # The gradient of a weighted sum: of the mean, or of each token's own log-prob.
    weights = jnp.array([[1.0, 3.0, 9.0], [2.0, 9.0, 9.0]])

    def weighted(x, level):
        return (weights * surrogates.at_level(x, mask=mask, ratio_level=level)).sum()

    gradient = jax.grad(weighted)(jnp.asarray(x), "sequence")
    np.testing.assert_allclose(gradient, [[2, 2, 0], [2, 0, 0]], atol=1e-6)
    gradient = jax.grad(weighted)(jnp.asarray(x), "sequence_token")
    np.testing.assert_allclose(gradient, [[1, 3, 0], [2, 0, 0]], atol=1e-6)


def test_the_two_levels_of_a_sequence_agree_where_advantages_do():
    """They disagree if advantages differ within a response."""
    level = {"clip_range": 0.05}
    pairs = {
        equal: [
            loss_and_gradient(
                functools.partial(PPO, ratio_level=ratio_level),
                advantages=ARRAYS["advantages"]
                * (1 if equal else RECORDED["logprobs"]),
                **level,
            )
            for ratio_level in ("sequence", "sequence_token")
        ]
        for equal in (True, False)
    }
    for equal, ((left, of_mean), (right, of_token)) in pairs.items():
        assert float(left) == pytest.approx(float(right), rel=1e-6)
        same = np.abs(np.asarray(of_mean - of_token)).max() < 1e-6
        assert same == equal


def test_what_is_reported_of_weights_and_gates():
    logprobs = jnp.log(jnp.array([[2.0, 1.0, 0.5, 9.0]]))
    arrays = {
        "logprobs": logprobs,
        "old_logprobs": jnp.zeros((1, 4)),
        "advantages": jnp.array([[1.0, 1.0, -1.0, 1.0]]),
        "mask": jnp.array([[True, True, True, False]]),
    }
    # Without a bound above it is the bound below.
    loss, _ = losses.cispo_loss(**arrays, clip_range=0.2)
    same, _ = losses.cispo_loss(**arrays, clip_range=0.2, clip_range_high=0.2)
    assert float(loss) == float(same)
    _, stats = losses.cispo_loss(**arrays, clip_range=0.2, clip_range_high=0.5)
    means = masked.mean_stats(stats)
    assert float(means["policy/clipfrac"]) == pytest.approx(2 / 3)
    assert float(means["policy/ratio_mean"]) == pytest.approx(3.5 / 3)
    assert float(means["policy/ratio_max"]) == pytest.approx(2.0)
    expected = 0.5 * np.log(2) ** 2 * 2 / 3
    assert float(means["policy/approxkl"]) == pytest.approx(expected, rel=1e-6)
    gates = {"temperature": 1.0, "negative_temperature": 2.0}
    _, stats = losses.sapo_loss(**arrays, **gates)
    sigmoid = 1 / (1 + np.exp(-np.array([1.0, 0.0, 2.0 * -0.5])))
    slopes = 4 * sigmoid * (1 - sigmoid)
    means = masked.mean_stats(stats)
    assert float(means["policy/gate"]) == pytest.approx(slopes.mean(), rel=1e-5)


def test_prompts_weigh_the_same_by_prompt_mean():
    """Every prompt has 1/P and every token of a prompt the same share, in any order."""
    lengths = np.array([6, 1, 3, 4, 0, 5, 0, 0])
    mask = np.arange(6)[None, :] < lengths[:, None]
    scale = aggregation.prompt_scale(mask, group_size=4)
    options = {"aggregation": "prompt_mean"}
    weights = losses.token_weights(mask, loss_scale_factor=scale, **options)
    expected = np.repeat([[1 / 2 / 14], [1 / 2 / 5]], 4, axis=0) * mask
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    # Two minibatches of other rows: their mean is the loss of the whole.
    order = np.array([5, 0, 4, 1, 3, 6, 7, 2])
    x = np.random.default_rng(0).normal(size=mask.shape).astype(np.float32)
    total = 0.0
    for rows in (order[:4], order[4:]):
        part = losses.token_weights(
            mask[rows], loss_scale_factor=scale[rows], **options
        )
        responses = mask[rows].any(axis=1).sum()
        total += float((part * x[rows]).sum()) * responses / 5
    assert total == pytest.approx(float((expected * x).sum()), rel=1e-5)
    # Rows that another part holds are all 0 there, weights and scale.
    weights = losses.token_weights(
        np.zeros_like(mask), loss_scale_factor=jnp.zeros(8), **options
    )
    np.testing.assert_array_equal(weights, 0.0)


def test_a_prompt_without_a_token_weighs_nothing():
    mask = np.array([[0, 0], [0, 0], [1, 1], [1, 0]], bool)
    scale = aggregation.prompt_scale(mask, group_size=2)
    np.testing.assert_array_equal(scale, [1.0, 1.0, 1.5, 1.5])  # 3 tokens · 1 / 2
    options = {"aggregation": "prompt_mean", "loss_scale_factor": scale}
    weights = losses.token_weights(mask, **options)
    np.testing.assert_allclose(weights, mask / 3.0, rtol=1e-6)


def test_what_does_not_fit_is_refused():
    arrays = {**ARRAYS, "logprobs": RECORDED["logprobs"], "mask": MASK}
    with pytest.raises(InputError, match="ratio_level: expected one of 'token'"):
        PPO(**arrays, ratio_level="prompt")
    flat = {"mask": jnp.ones(4, bool), "ratio_level": "sequence"}
    with pytest.raises(ValueError, match="mask"):  # responses need rows
        surrogates.at_level(jnp.zeros(4), **flat)
    with pytest.raises(InputError, match=r"clip_range_high: expected .* above 0"):
        CISPO(**arrays | {"clip_range_high": 0.0})
    with pytest.raises(InputError, match="negative_temperature: expected"):
        SAPO(**arrays | {"negative_temperature": -1.0})
    with pytest.raises(InputError, match=r"expected the f32.B. of `prompt_scale`"):
        CISPO(**arrays, aggregation="prompt_mean")
    with pytest.raises(InputError, match=r"expected None .* got an array \(8,\)"):
        CISPO(**arrays, loss_scale_factor=jnp.ones(8))
    with pytest.raises(TypeError, match="mask: expected bool, got int32"):
        losses.token_weights(jnp.asarray(MASK, jnp.int32))
    with pytest.raises(ValueError, match="mask"):
        SAPO(**arrays | {"mask": MASK[:4]})
    with pytest.raises(TypeError, match="logprobs"):
        SAPO(**arrays | {"logprobs": arrays["logprobs"].astype(jnp.bfloat16)})


@pytest.mark.parametrize("name", one_in(2, VARIANTS))
def test_nothing_but_the_log_probs_has_a_gradient(name):
    """Advantages and the sampler's log-probs get no gradient."""

    def value(arrays):
        return VARIANTS[name](logprobs=RECORDED["logprobs"], mask=MASK, **arrays)[0]

    arrays = jax.tree.map(jnp.asarray, ARRAYS)
    for key, gradient in jax.grad(value)(arrays).items():
        assert not gradient.any(), key
