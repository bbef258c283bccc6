"""Score centring: its gradient by a loop, its mean under the sampler, its bounds."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.policy_losses import centred_loss

pytestmark = pytest.mark.usefixtures("strict_dtypes")

VOCAB, K = 7, 3
LENGTHS = (5, 1, 3, 4)
MASK = np.arange(5)[None, :] < np.array(LENGTHS)[:, None]
RNG = np.random.default_rng(11)
LOGITS, OLD = (RNG.normal(0, 1.2, (*MASK.shape, VOCAB)) for _ in range(2))
OLD -= np.log(np.exp(OLD).sum(axis=-1, keepdims=True))
DRAWN = RNG.integers(0, VOCAB, MASK.shape)
ADVANTAGES = RNG.normal(0, 1, MASK.shape)
BOUNDS = {
    "none": {},
    "cap": {"cap": 1.3},
    "mask": {"cap": 1.5, "floor": 0.6},
}


def likeliest(k):
    return np.argsort(-OLD, axis=-1)[..., :k]


def differentiated(logits=LOGITS, drawn=DRAWN, k=K, mask=MASK, **options):
    """The loss as a function of logits f[B, S, V], and its gradient."""
    top = likeliest(k)
    arrays = {
        "old_logprobs": np.take_along_axis(OLD, drawn[..., None], axis=-1)[..., 0],
        "old_top_logprobs": np.take_along_axis(OLD, top, axis=-1),
        "advantages": ADVANTAGES,
    }
    arrays = {key: np.float32(x) for key, x in arrays.items()} | {"mask": mask}

    def value(logits):
        now = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(now, drawn[..., None], axis=-1)[..., 0]
        beside = jnp.take_along_axis(now, top, axis=-1)
        pair = {"logprobs": own, "top_logprobs": beside}
        return centred_loss(**{**arrays, **pair, **options})

    (loss, stats), slope = jax.value_and_grad(value, has_aux=True)(jnp.float32(logits))
    return float(loss), np.asarray(slope), stats


def weight(ratio, cap=math.inf, floor=None):
    """f: 1 without a cap; the ratio up to the cap; the ratio within bounds, else 0."""
    if cap == math.inf:
        return 1.0
    if floor is None:
        return min(ratio, cap)
    return ratio if floor <= ratio <= cap else 0.0


def score(b, t, v):
    """∇ log π(v) in the logits, e_v - π."""
    now = np.exp(LOGITS[b, t]) / np.exp(LOGITS[b, t]).sum()
    return np.eye(VOCAB)[v] - now, now


def by_loop(k=K, **bounds):
    """-A·(f·∇log π(y) - Σ_v q̂ f ∇log π_v), where q̂ is μ in the top k, else ρ·π."""
    output = np.zeros(LOGITS.shape)
    for b, t in oracles.entries(MASK):
        _, now = score(b, t, 0)
        old, top = np.exp(OLD[b, t]), set(likeliest(k)[b, t])
        rest = [v for v in range(VOCAB) if v not in top]
        rho = old[rest].sum() / now[rest].sum() if rest else 1.0
        taken = np.where([v in top for v in range(VOCAB)], old, rho * now)
        mean = sum(
            taken[v] * weight(now[v] / taken[v], **bounds) * score(b, t, v)[0]
            for v in range(VOCAB)
        )
        y = DRAWN[b, t]
        own = weight(now[y] / old[y], **bounds) * score(b, t, y)[0]
        output[b, t] = -ADVANTAGES[b, t] * (own - mean)
    return output


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("k", [1, K, VOCAB])
@pytest.mark.parametrize("name", BOUNDS)
def test_the_gradient_is_that_of_a_loop(name, k):
    """For means over tokens and responses; the whole vocabulary has no tail."""
    bounds = BOUNDS[name]
    expected = by_loop(k, **bounds)
    for aggregation, shares in (
        ("token_mean", np.full(MASK.shape, 1 / MASK.sum())),
        ("sequence_mean", np.array([[1 / 4 / length] for length in LENGTHS])),
    ):
        _, slope, _ = differentiated(k=k, aggregation=aggregation, **bounds)
        of_cells = expected * (shares * MASK)[..., None]
        np.testing.assert_allclose(slope, of_cells, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_constant_reward_has_no_gradient_in_expectation_over_the_sampler(name):
    """This holds also if π is far from μ; without the mean there is a gradient."""
    constant = {"advantages": np.ones(MASK.shape, np.float32)}
    total = np.zeros(LOGITS.shape)
    for v in range(VOCAB):
        drawn = np.full_like(DRAWN, v)
        _, slope, _ = differentiated(drawn=drawn, k=VOCAB, **constant, **BOUNDS[name])
        total += np.exp(OLD[..., v, None]) * slope
    assert np.abs(slope).max() > 1e-2
    np.testing.assert_allclose(total, 0, atol=1e-7)


def test_what_is_reported():
    _, _, stats = differentiated(**BOUNDS["mask"])
    means = {key: float(mean) for key, mean in masked.mean_stats(stats).items()}
    top = np.take_along_axis(np.exp(OLD), likeliest(K), axis=-1).sum(axis=-1)
    now = LOGITS - np.log(np.exp(LOGITS).sum(axis=-1, keepdims=True))
    gaps = np.take_along_axis(now - OLD, DRAWN[..., None], axis=-1)[..., 0][MASK]
    beyond = (np.exp(gaps) > 1.5) | (np.exp(gaps) < 0.6)
    assert 0 < beyond.sum() < len(gaps)
    del means["loss/policy"]
    assert means == pytest.approx(
        {
            "policy/approxkl": np.mean(gaps**2 / 2),
            "policy/ratio_mean": np.exp(gaps).mean(),
            "policy/ratio_max": np.exp(gaps).max(),
            "policy/clipfrac": beyond.mean(),
            "policy/top_mass": top[MASK].mean(),
        },
        rel=2e-5,
    )


def test_what_is_under_the_mask_and_in_other_parts_changes_nothing():
    arrays = {
        "old_logprobs": OLD[..., 0],
        "old_top_logprobs": OLD[..., :K],
        "advantages": ADVANTAGES,
        "logprobs": OLD[..., 1],
        "top_logprobs": OLD[..., 1 : K + 1],
    }
    loss = functools.partial(centred_loss, cap=1.3)

    def filled(number):
        of = {}
        for key, x in arrays.items():
            inside = MASK[..., None] if x.ndim == 3 else MASK
            of[key] = np.where(inside, x, number).astype(np.float32)
        return of

    def slopes(number, rows=slice(None), **counts):
        of = {key: x[rows] for key, x in filled(number).items()}

        def value(now):
            return loss(**{**of, **now}, mask=MASK[rows], **counts)[0]

        now = {key: of[key] for key in ("logprobs", "top_logprobs")}
        return jax.value_and_grad(value)(jax.tree.map(jnp.asarray, now))

    value, slope = slopes(0.0)
    counts = {"num_tokens": jnp.float32(MASK.sum()), "num_responses": jnp.float32(4)}
    parts = [slopes(np.nan, rows, **counts) for rows in (slice(0, 2), slice(2, 4))]
    assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(value), rel=1e-5)
    for key in slope:
        joined = np.concatenate([part[1][key] for part in parts])
        np.testing.assert_allclose(joined, slope[key], rtol=1e-5, atol=1e-9)


def test_a_token_that_cannot_come_is_left_out():
    """Fewer than k tokens are possible; the sampler reports the others as -inf."""
    old = np.float32(np.log(np.array([[[0.6, 0.4, 0.0]]]) + 1e-45))
    old[..., 2] = -np.inf
    arrays = {"old_top_logprobs": old, "old_logprobs": old[..., 0]}
    arrays |= {"advantages": np.ones((1, 1), np.float32), "mask": np.ones((1, 1), bool)}

    def value(top):
        return centred_loss(logprobs=top[..., 0], top_logprobs=top, **arrays)[0]

    slope = np.asarray(jax.grad(value)(jnp.log(jnp.float32([[[0.5, 0.5, 0.0]]]))))
    assert np.isfinite(slope[..., :2]).all()
    assert slope[0, 0, 2] == 0


def test_what_does_not_fit_is_refused():
    for options, message in (
        ({"cap": 0.5}, "cap: expected a number of at least 1"),
        (
            {"cap": 2.0, "floor": 1.5},
            "floor: expected a number above 0 and of at most 1",
        ),
        ({"floor": 0.5}, "floor: expected none without a cap"),
    ):
        with pytest.raises(InputError, match=message):
            differentiated(**options)
    with pytest.raises(ValueError, match="old_top_logprobs"):
        differentiated(old_top_logprobs=np.float32(OLD[..., :1]))
