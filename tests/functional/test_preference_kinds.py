"""SimPO, ORPO and KTO, and all losses of preferences against TRL's trainers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from places import FIXTURES
from tiers import one_in

from rlhf_jax import losses, masked
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes")

RECORDED = dict(np.load(FIXTURES / "trl_preferences.npz"))
MASK, DESIRABLE = RECORDED["mask"], RECORDED["desirable"]


def sums(x):
    return masked.masked_sum(x, mask=MASK, axis=1)


def halves(x):
    return {"chosen_logprobs": x[:4], "rejected_logprobs": x[4:]}


def of_pairs(logprobs, **options):
    ref = halves(sums(RECORDED["ref_logprobs"]))
    return losses.dpo_loss(
        **halves(sums(logprobs)),
        **{f"ref_{name}": x for name, x in ref.items()},
        beta=0.3,
        **options,
    )[0]


def means_of(logprobs):
    return halves(sums(logprobs) / jnp.sum(MASK, axis=1, dtype=jnp.float32))


def odds_alone(logprobs):
    """The loss without its first term, which TRL computes over other tokens."""
    pairs = means_of(logprobs)
    loss = losses.orpo_loss(**pairs, odds_weight=0.2)[0]
    return loss + jnp.mean(pairs["chosen_logprobs"])


def of_texts(logprobs, *, shift):
    kl = losses.kto_kl(
        logprobs=sums(RECORDED["kl_logprobs"]) + jnp.float32(shift),
        ref_logprobs=sums(RECORDED["ref_kl_logprobs"]),
    )
    return losses.kto_loss(
        logprobs=sums(logprobs),
        ref_logprobs=sums(RECORDED["ref_logprobs"]),
        desirable=DESIRABLE,
        kl=kl,
        beta=0.3,
        undesirable_weight=1.5,
    )[0]


TRL = {
    "sigmoid": of_pairs,
    "cdpo": functools.partial(of_pairs, label_smoothing=0.2),
    "robust": functools.partial(of_pairs, kind="robust", label_smoothing=0.2),
    "simpo": lambda x: losses.simpo_loss(**means_of(x), beta=2.0, target_margin=0.5)[0],
    "orpo_odds": odds_alone,
    "kto": functools.partial(of_texts, shift=0.0),
    "kto_clipped": functools.partial(of_texts, shift=-2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL)
def test_losses_and_gradients_are_those_of_trl(name):
    loss, gradient = jax.value_and_grad(TRL[name])(jnp.asarray(RECORDED["logprobs"]))
    assert float(loss) == pytest.approx(RECORDED[f"{name}/loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, RECORDED[f"{name}/gradient"], atol=1e-6)


def test_z0_is_that_of_trl():
    assert RECORDED["kto/kl"] > 0.1
    assert RECORDED["kto_clipped/kl"] == 0
    kl = losses.kto_kl(
        logprobs=sums(RECORDED["kl_logprobs"]),
        ref_logprobs=sums(RECORDED["ref_kl_logprobs"]),
    )
    assert float(kl) == pytest.approx(RECORDED["kto/kl"], abs=1e-6)


# --- against loops ------------------------------------------------------------

RNG = np.random.default_rng(3)
CHOSEN, REJECTED = -np.abs(RNG.normal(1, 0.7, (2, 6))).astype(np.float32)
PAIRS = {"chosen_logprobs": CHOSEN, "rejected_logprobs": REJECTED}
LOGPROBS, REF, OTHERS, REF_OTHERS = RNG.normal(-9, 2, (4, 6)).astype(np.float32)
TEXTS = {"logprobs": LOGPROBS, "ref_logprobs": REF}
GOOD = np.array([1, 0, 0, 1, 1, 0], bool)
simpo = functools.partial(losses.simpo_loss, beta=1.7, target_margin=0.6)
orpo = functools.partial(losses.orpo_loss, odds_weight=0.4)
kto = functools.partial(
    losses.kto_loss,
    desirable=GOOD,
    kl=jnp.float32(0.3),
    beta=0.2,
    desirable_weight=1.3,
    undesirable_weight=0.7,
)
KINDS = {"simpo": (simpo, PAIRS), "orpo": (orpo, PAIRS), "kto": (kto, TEXTS)}


def means(stats):
    return {name: float(mean) for name, mean in masked.mean_stats(stats).items()}


def test_simpo_and_orpo_match_the_oracle():
    right = (CHOSEN > REJECTED).mean()
    assert 0 < right < 1
    loss, stats = simpo(**PAIRS)
    expected = oracles.simpo_pairs(np.float64(CHOSEN), np.float64(REJECTED), 1.7, 0.6)
    assert float(loss) == pytest.approx(expected.mean(), rel=1e-5)
    lead = np.float64(CHOSEN) - REJECTED
    assert means(stats) == pytest.approx(
        {
            "loss/dpo": expected.mean(),
            "dpo/chosen_reward": 1.7 * np.float64(CHOSEN).mean(),
            "dpo/rejected_reward": 1.7 * np.float64(REJECTED).mean(),
            "dpo/margin": 1.7 * lead.mean(),
            "dpo/accuracy": right,
            "dpo/chosen_logprob": np.float64(CHOSEN).mean(),
            "dpo/rejected_logprob": np.float64(REJECTED).mean(),
        },
        rel=1e-5,
    )
    loss, stats = orpo(**PAIRS)
    expected = oracles.orpo_pairs(np.float64(CHOSEN), np.float64(REJECTED), 0.4)
    assert float(loss) == pytest.approx(expected.mean(), rel=1e-5)
    odds = [np.log(p / (1 - p)) for p in np.exp(np.float64([CHOSEN, REJECTED]))]
    numbers = means(stats)
    assert numbers["loss/dpo"] == pytest.approx(expected.mean(), rel=1e-5)
    assert numbers["dpo/nll"] == pytest.approx(-np.float64(CHOSEN).mean(), rel=1e-5)
    assert numbers["dpo/margin"] == pytest.approx((odds[0] - odds[1]).mean(), rel=1e-4)
    assert numbers["dpo/accuracy"] == pytest.approx(right)


def test_kto_matches_the_oracle():
    others = np.float64(OTHERS) - REF_OTHERS
    others += 0.5 - others.mean()
    texts = {"logprobs": others.astype(np.float32), "ref_logprobs": np.zeros(6, "f4")}
    kl = losses.kto_kl(**texts)
    ratios = np.float64(LOGPROBS) - REF
    expected, slopes, z0 = oracles.kto_texts(ratios, GOOD, others, 0.2, (1.3, 0.7))
    assert float(kl) == pytest.approx(z0, rel=1e-5)
    (loss, stats), gradient = jax.value_and_grad(
        lambda x: kto(**TEXTS | {"logprobs": x}, kl=kl), has_aux=True
    )(LOGPROBS)
    assert float(loss) == pytest.approx(expected.mean(), rel=1e-5)
    np.testing.assert_allclose(gradient, slopes / 6, rtol=1e-4)
    assert means(stats) == pytest.approx(
        {
            "loss/dpo": expected.mean(),
            "kto/kl": z0,
            "kto/desirable_reward": 0.2 * ratios[GOOD].mean(),
            "kto/undesirable_reward": 0.2 * ratios[~GOOD].mean(),
            "kto/desirable_logprob": LOGPROBS[GOOD].mean(dtype=np.float64),
            "kto/undesirable_logprob": LOGPROBS[~GOOD].mean(dtype=np.float64),
        },
        rel=1e-4,
    )


def test_no_gradient_reaches_z0_or_the_reference():
    def loss(ref, kl):
        return kto(**TEXTS | {"ref_logprobs": ref}, kl=kl)[0]

    for leaf in jax.grad(loss, (0, 1))(REF, jnp.float32(0.3)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    slope = jax.grad(lambda x: losses.kto_kl(logprobs=x, ref_logprobs=x - 1.0))(REF)
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, sorted(KINDS)))
def test_garbage_and_cuts_change_nothing(name):
    loss, arrays = KINDS[name]
    mask = np.array([1, 1, 0, 1, 0, 1], bool)
    labels = {"desirable": GOOD[mask]} if name == "kto" else {}
    expected, stats = loss(**{key: x[mask] for key, x in arrays.items()}, **labels)
    count = "num_texts" if name == "kto" else "num_pairs"
    for garbage in (np.nan, -1e30):
        spoilt = {
            key: np.where(mask, x, np.float32(garbage)) for key, x in arrays.items()
        }
        of = jax.value_and_grad(lambda x: loss(**x, mask=mask), has_aux=True)
        (output, stats_of_spoilt), gradient = of(spoilt)
        assert float(output) == pytest.approx(float(expected), rel=1e-6)
        assert means(stats_of_spoilt) == pytest.approx(means(stats), rel=1e-6)
        for leaf in jax.tree.leaves(gradient):
            np.testing.assert_array_equal(leaf[~mask], 0)
            assert np.isfinite(leaf).all()
    parts = []
    for a, b in itertools.pairwise((0, 1, 4, 6)):
        cut = {"desirable": GOOD[a:b]} if name == "kto" else {}
        rows = {key: x[a:b] for key, x in arrays.items()}
        parts.append(loss(**rows, **cut, **{count: jnp.float32(6)})[0])
    assert float(sum(parts)) == pytest.approx(float(loss(**arrays)[0]), rel=1e-5)


@pytest.mark.slow
def test_a_sure_response_has_finite_odds():
    """Extreme log-probs neither overflow nor lose their gradient."""
    loss, gradient = jax.value_and_grad(lambda x: orpo(**x)[0])(
        {
            "chosen_logprobs": np.array([-1e4, 0.0], np.float32),
            "rejected_logprobs": np.array([0.0, -1e4], np.float32),
        }
    )
    assert np.isfinite(loss)
    np.testing.assert_allclose(gradient["chosen_logprobs"], [-0.7, -0.5], rtol=1e-4)
    far = {"logprobs": np.array([1e4, -1e4] * 3, np.float32), "ref_logprobs": REF}
    loss, gradient = jax.value_and_grad(lambda x: kto(**far | {"logprobs": x})[0])(
        far["logprobs"]
    )
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simpo(**PAIRS, beta=0.0), "beta: expected a finite number abo"),
        (lambda: simpo(**PAIRS, target_margin=-1.0), "target_margin: expected"),
        (lambda: orpo(**PAIRS, odds_weight=0.0), "odds_weight: expected a fin"),
        (lambda: kto(**TEXTS, beta=-1.0), "beta: expected a finite number abo"),
        (lambda: kto(**TEXTS, desirable_weight=0.0), "desirable_weight: expect"),
    ],
)
def test_numbers_that_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_wrong_arrays_say_what_to_do():
    with pytest.raises(ValueError, match=r"rejected_logprobs \(5,\)"):
        simpo(**PAIRS | {"rejected_logprobs": REJECTED[1:]})
    with pytest.raises(TypeError, match=r"chosen_logprobs: expected float32"):
        orpo(**PAIRS | {"chosen_logprobs": CHOSEN.astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"desirable: expected bool"):
        kto(**TEXTS, desirable=GOOD.astype(np.int32))
    with pytest.raises(ValueError, match=r"kl: expected shape \(\)"):
        kto(**TEXTS, kl=jnp.zeros(6))
    with pytest.raises(TypeError, match=r"logprobs: expected float32"):
        losses.kto_kl(logprobs=LOGPROBS.astype(np.float16), ref_logprobs=REF)
    with pytest.raises(ValueError, match=r"ref_logprobs \(5,\)"):
        losses.kto_kl(logprobs=LOGPROBS, ref_logprobs=REF[1:])
    with pytest.raises(TypeError, match=r"mask: expected bool, got int32"):
        simpo(**PAIRS, mask=np.ones(6, np.int32))


def test_without_a_margin_simpo_is_a_difference_of_means():
    loss, _ = losses.simpo_loss(**PAIRS, beta=2.0)
    margin = np.asarray(CHOSEN, np.float64) - np.asarray(REJECTED, np.float64)
    expected = np.log1p(np.exp(-2.0 * margin)).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_parts_of_pairs_are_divided_by_the_pairs_of_the_whole():
    for loss, arrays in ((simpo, PAIRS), (orpo, PAIRS), (kto, TEXTS)):
        whole, _ = loss(**arrays)
        count = {"num_texts" if loss is kto else "num_pairs": jnp.float32(12)}
        half, _ = loss(**arrays, **count)
        assert float(half) == pytest.approx(float(whole) / 2, rel=1e-6)
