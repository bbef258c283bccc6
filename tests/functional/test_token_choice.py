"""Tokens by entropy or covariance: loops, by hand, TRL and verl."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from places import FIXTURES

from rlhf_jax import losses
from rlhf_jax.functional import policy_losses
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes")

RECORDED = dict(np.load(FIXTURES / "regularisers.npz"))
MASK = RECORDED["mask"]
ARRAYS = {
    name: jnp.asarray(RECORDED[name]) for name in ("logprobs", "old_logprobs", "mask")
} | {"advantages": jnp.broadcast_to(RECORDED["advantages"][:, None], MASK.shape)}
CHANCE = np.random.default_rng(1).uniform(size=MASK.shape).astype(np.float32)
COEF = 0.7  # of KL-Cov, as recorded
UNCLIPPED = functools.partial(losses.policy_loss, clip_range=1e3)
COVARIANCES = policy_losses.covariances(
    **{name: ARRAYS[name] for name in ("logprobs", "advantages", "mask")}
)


def chosen_alone(tokens, loss=UNCLIPPED):
    """The loss and its gradient if the other tokens have no advantage."""
    arrays = {**ARRAYS, "advantages": jnp.where(tokens, ARRAYS["advantages"], 0.0)}

    def value(logprobs):
        return loss(**{**arrays, "logprobs": logprobs})[0]

    return jax.value_and_grad(value)(arrays["logprobs"])


def of_clip_cov():
    within = (COVARIANCES > 0.5) & (COVARIANCES < 2.0)
    share = {"mask": MASK, "share": 0.2}
    return chosen_alone(~policy_losses.top_share(CHANCE, among=within, **share))


def of_kl_cov():
    tokens = policy_losses.top_share(COVARIANCES, mask=MASK, share=0.2)

    def loss(advantages, **arrays):
        kl, _ = policy_losses.kl_cov_loss(chosen=tokens, **arrays)
        value, stats = UNCLIPPED(advantages=advantages, **arrays)
        return value + COEF * kl, stats

    return chosen_alone(jnp.ones(MASK.shape, bool), loss)


def of_top_entropy():
    tokens = policy_losses.top_share(RECORDED["entropy"], mask=MASK, share=0.2)
    assert int(tokens.sum()) == 6
    return chosen_alone(tokens, functools.partial(losses.policy_loss, clip_range=0.2))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("clip_cov", of_clip_cov),
        ("kl_cov", of_kl_cov),
        ("top_entropy", of_top_entropy),
    ],
)
def test_losses_and_gradients_are_those_of_verl_and_trl(name, ours):
    value, gradient = ours()
    assert float(value) == pytest.approx(RECORDED[f"{name}/loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, RECORDED[f"{name}/gradient"], atol=1e-6)


def test_covariances_are_those_of_a_loop():
    tokens = oracles.entries(MASK)
    x, y = (np.asarray(ARRAYS[k], np.float64) for k in ("logprobs", "advantages"))
    means = [np.mean([z[b, t] for b, t in tokens]) for z in (x, y)]
    expected = np.zeros(MASK.shape)
    for b, t in tokens:
        expected[b, t] = (x[b, t] - means[0]) * (y[b, t] - means[1])
    np.testing.assert_allclose(COVARIANCES, expected, rtol=2e-5, atol=1e-6)
    assert expected.mean() != 0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.35, 0.99, 1.0])
@pytest.mark.parametrize("few", [True, False])
def test_the_largest_share_is_that_of_a_sorted_list(share, few):
    among = RECORDED["entropy"] < 1.0 if few else np.ones(MASK.shape, bool)
    tokens = [cell for cell in oracles.entries(MASK) if among[cell]]
    count = max(1, int(round(share * 100) * MASK.sum() // 100))
    best = sorted(tokens, key=lambda cell: -CHANCE[cell])[:count]
    expected = np.zeros(MASK.shape, bool)
    expected[tuple(zip(*best, strict=True))] = True
    found = policy_losses.top_share(CHANCE, mask=MASK, share=share, among=among)
    np.testing.assert_array_equal(found, expected)


def test_what_is_under_the_mask_is_never_read():
    dirty = np.where(MASK, CHANCE, np.nan).astype(np.float32)
    clean = policy_losses.top_share(CHANCE, mask=MASK, share=0.3)
    np.testing.assert_array_equal(
        policy_losses.top_share(dirty, mask=MASK, share=0.3), clean
    )
    spoilt = {
        name: jnp.where(MASK, ARRAYS[name], jnp.nan)
        for name in ("logprobs", "advantages")
    }
    np.testing.assert_array_equal(
        policy_losses.covariances(**spoilt, mask=MASK), COVARIANCES
    )


def test_nothing_to_choose_from_is_no_token():
    none = np.zeros(MASK.shape, bool)
    for options in ({"mask": none}, {"mask": MASK, "among": none}):
        assert not policy_losses.top_share(CHANCE, share=0.5, **options).any()


def test_equal_numbers_are_all_chosen():
    equal = np.ones(MASK.shape, np.float32)
    found = policy_losses.top_share(equal, mask=MASK, share=0.1)
    np.testing.assert_array_equal(found, MASK)


def test_parts_of_kl_cov_add_up():
    tokens = policy_losses.top_share(COVARIANCES, mask=MASK, share=0.4)
    arrays = {name: ARRAYS[name] for name in ("logprobs", "old_logprobs")}
    arrays |= {"mask": MASK, "chosen": tokens}
    whole, stats = policy_losses.kl_cov_loss(**arrays)
    parts = [
        policy_losses.kl_cov_loss(
            **{name: array[rows] for name, array in arrays.items()},
            num_tokens=jnp.float32(MASK.sum()),
        )
        for rows in (slice(0, 3), slice(3, 8))
    ]
    assert sum(float(part) for part, _ in parts) == pytest.approx(float(whole))
    total, count = stats["loss/kl_cov"]
    distance = np.abs(arrays["logprobs"] - arrays["old_logprobs"])
    assert float(total) == pytest.approx(distance[np.asarray(tokens)].sum(), rel=1e-5)
    assert float(count) == MASK.sum()


def test_what_is_no_share_is_refused():
    for share in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="share: expected"):
            policy_losses.top_share(CHANCE, mask=MASK, share=share)
    with pytest.raises(ValueError, match="mask"):
        policy_losses.top_share(CHANCE, mask=MASK[:4], share=0.5)


def test_rounding_of_equal_log_probs_has_no_slope():
    arrays = {"old_logprobs": jnp.array([-1.0, -1.0, -1.0])}
    arrays |= {"chosen": jnp.ones(3, bool), "mask": jnp.ones(3, bool)}

    def loss(logprobs):
        return policy_losses.kl_cov_loss(logprobs=logprobs, **arrays)[0]

    slope = jax.grad(loss)(jnp.array([-1.0, -1.000001, -0.999]))
    np.testing.assert_allclose(slope, [0, 0, 1 / 3], rtol=1e-6)
