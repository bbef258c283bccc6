"""DPO and its variants as functions of log-probs; Bradley-Terry is in test_losses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import losses, masked
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes")

RNG = np.random.default_rng(11)
BETA = 0.3
NAMES = ("chosen", "rejected", "ref_chosen", "ref_rejected")
PAIRS = {f"{name}_logprobs": RNG.normal(-20, 3, 6).astype(np.float32) for name in NAMES}
POLICY = {name: x for name, x in PAIRS.items() if "ref" not in name}
FREE = dict.fromkeys(PAIRS) | POLICY
SOFT = np.array([0.0, 1.0, 0.5, 0.1, 0.9, 0.3], np.float32)
SMOOTH = {"soft": SOFT, "0.2": 0.2, "0": 0.0}
for_each_kind = pytest.mark.parametrize(
    ("kind", "smoothing"),
    [
        *(("sigmoid", smoothing) for smoothing in SMOOTH),
        ("robust", "0.2"),
        *((kind, "0") for kind in ("ipo", "hinge")),
    ],
)


def dpo_loss(pairs=PAIRS, **options):
    return losses.dpo_loss(**pairs, **{"beta": BETA, **options})


def lead_of(pairs=PAIRS):
    """h in float64, without the reference's terms if there is none."""
    chosen, rejected, *reference = (
        np.float64(
            0 if pairs[f"{name}_logprobs"] is None else pairs[f"{name}_logprobs"]
        )
        for name in NAMES
    )
    return chosen - reference[0] - (rejected - reference[1])


def means(stats):
    return {name: float(mean) for name, mean in masked.mean_stats(stats).items()}


@pytest.mark.parametrize(
    ("kind", "smoothing", "pairs"),
    [
        ("sigmoid", "0", PAIRS),
        ("sigmoid", "0.2", PAIRS),
        ("sigmoid", "soft", PAIRS),
        ("robust", "0.2", PAIRS),
        ("ipo", "0", PAIRS),
        ("hinge", "0", PAIRS),
        ("sigmoid", "0.2", FREE),
        ("hinge", "0", FREE),
    ],
)
def test_losses_and_gradients_match_the_oracle(kind, smoothing, pairs):
    options = {"kind": kind, "label_smoothing": SMOOTH[smoothing]}

    def loss(policy):
        return dpo_loss(pairs | policy, **options)

    (output, stats), gradient = jax.value_and_grad(loss, has_aux=True)(POLICY)
    lead = lead_of(pairs)
    smooth = np.broadcast_to(np.float64(SMOOTH[smoothing]), 6)
    expected, slopes = oracles.dpo_pairs(lead, BETA, kind, smooth)
    assert float(output) == pytest.approx(np.mean(expected), rel=1e-5)
    np.testing.assert_allclose(
        gradient["chosen_logprobs"], np.divide(slopes, 6), rtol=1e-4, atol=1e-7
    )
    np.testing.assert_allclose(
        gradient["rejected_logprobs"], -np.divide(slopes, 6), rtol=1e-4, atol=1e-7
    )
    assert means(stats)["loss/dpo"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert means(stats)["dpo/margin"] == pytest.approx(BETA * lead.mean(), rel=1e-4)


def test_statistics_are_implicit_rewards():
    stats = means(dpo_loss()[1])
    ratios = {
        name: np.float64(PAIRS[f"{name}_logprobs"]) - PAIRS[f"ref_{name}_logprobs"]
        for name in ("chosen", "rejected")
    }
    assert 0 < (lead_of() > 0).mean() < 1
    del stats["loss/dpo"]
    assert stats == pytest.approx(
        {
            "dpo/chosen_reward": BETA * ratios["chosen"].mean(),
            "dpo/rejected_reward": BETA * ratios["rejected"].mean(),
            "dpo/margin": BETA * lead_of().mean(),
            "dpo/accuracy": (lead_of() > 0).mean(),
            "dpo/chosen_logprob": PAIRS["chosen_logprobs"].mean(dtype=np.float64),
            "dpo/rejected_logprob": PAIRS["rejected_logprobs"].mean(dtype=np.float64),
        },
        rel=1e-4,
    )


@pytest.mark.cases(quick=3)
@for_each_kind
def test_where_the_policy_is_the_reference(kind, smoothing):
    """log 2 to the bit, with any smoothing; IPO aims at 1/(2β), SLiC at 1.

    There are four pairs, so that the sum is not rounded.
    """
    policy = {name: x[:4] for name, x in POLICY.items()}
    same = policy | {f"ref_{name}": x for name, x in policy.items()}
    smooth = SMOOTH[smoothing]
    smooth = smooth[:4] if smoothing == "soft" else smooth
    loss, stats = dpo_loss(same, kind=kind, label_smoothing=smooth)
    start = {"ipo": 1 / (2 * BETA) ** 2, "hinge": 1.0}
    start = start.get(kind, np.log(2))
    if kind in ("sigmoid", "robust"):
        assert float(loss) == np.float32(np.log(2))
    assert float(loss) == pytest.approx(start, rel=1e-6)
    assert means(stats)["dpo/margin"] == means(stats)["dpo/accuracy"] == 0


@for_each_kind
def test_no_gradient_reaches_the_reference_or_the_labels(kind, smoothing):
    smooth = jnp.broadcast_to(jnp.float32(SMOOTH[smoothing]), 6)

    def loss(reference, smooth):
        labels = {"label_smoothing": smooth} if kind == "sigmoid" else {}
        labels |= {"label_smoothing": SMOOTH["0.2"]} if kind == "robust" else {}
        return dpo_loss(PAIRS | reference, kind=kind, **labels)[0]

    reference = {name: x for name, x in PAIRS.items() if "ref" in name}
    for leaf in jax.tree.leaves(jax.grad(loss, (0, 1))(reference, smooth)):
        np.testing.assert_array_equal(leaf, np.zeros(6))


def test_what_both_answers_share_changes_nothing():
    """So the partition function of the implicit reward cancels."""
    shift = np.float32(4)
    shifted = PAIRS | {name: x + shift for name, x in POLICY.items()}
    assert float(dpo_loss(shifted)[0]) == pytest.approx(float(dpo_loss()[0]), rel=1e-5)


def test_a_certainly_wrong_label_is_the_other_answer_chosen():
    chosen, rejected, ref_chosen, ref_rejected = PAIRS.values()
    other = dict(zip(PAIRS, (rejected, chosen, ref_rejected, ref_chosen), strict=True))
    certain = jnp.ones(6, jnp.float32)
    output, _ = dpo_loss(label_smoothing=certain)
    assert float(output) == pytest.approx(float(dpo_loss(other)[0]), rel=1e-5)
    # A chance that all pairs share is an array of it.
    same, _ = dpo_loss(label_smoothing=0.2 * certain)
    assert float(same) == pytest.approx(float(dpo_loss(label_smoothing=0.2)[0]))


@pytest.mark.cases(quick=2)
@for_each_kind
def test_garbage_in_pairs_that_are_not_there(kind, smoothing):
    mask = np.array([1, 1, 0, 1, 0, 1], bool)
    labels = {"kind": kind, "label_smoothing": SMOOTH[smoothing]}

    def cut(x):
        return x[mask] if isinstance(x, np.ndarray) else x

    expected, stats = dpo_loss(
        {name: x[mask] for name, x in PAIRS.items()},
        kind=kind,
        label_smoothing=cut(SMOOTH[smoothing]),
    )
    for garbage in (np.nan, np.inf, -1e30):
        spoilt = {
            name: np.where(mask, x, np.float32(garbage)) for name, x in PAIRS.items()
        }

        def loss(policy, spoilt=spoilt):
            return dpo_loss(spoilt | policy, mask=mask, **labels)

        policy = {name: spoilt[name] for name in POLICY}
        (output, stats_of_garbage), gradient = jax.value_and_grad(loss, has_aux=True)(
            policy
        )
        assert float(output) == pytest.approx(float(expected), rel=1e-6)
        assert means(stats_of_garbage) == pytest.approx(means(stats), rel=1e-6)
        for leaf in jax.tree.leaves(gradient):
            np.testing.assert_array_equal(leaf[~mask], 0)
            assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_parts_add_up():
    whole, stats = dpo_loss(label_smoothing=SOFT)
    parts = [
        dpo_loss(
            {name: x[a:b] for name, x in PAIRS.items()},
            label_smoothing=SOFT[a:b],
            num_pairs=jnp.float32(6),
        )
        for a, b in itertools.pairwise((0, 1, 4, 6))
    ]
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(whole))
    added = parts[0][1]
    for part in parts[1:]:
        added = masked.add_stats(added, part[1])
    assert means(added) == pytest.approx(means(stats), rel=1e-5)


def test_nothing_overflows():
    far = {name: np.full(1, 1e4, np.float32) for name in PAIRS}
    far["chosen_logprobs"] = -far["chosen_logprobs"]
    loss, gradient = jax.value_and_grad(lambda x: dpo_loss(far | x)[0])(
        {"chosen_logprobs": far["chosen_logprobs"]}
    )
    assert float(loss) == pytest.approx(2e4 * BETA)
    np.testing.assert_allclose(gradient["chosen_logprobs"], [-BETA], rtol=1e-6)


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        (PAIRS, {"beta": 0.0}, r"beta: expected a finite number above 0, got 0.0"),
        (PAIRS, {"beta": -1.0}, r"beta: expected a finite number above 0, got -1.0"),
        (PAIRS, {"beta": float("nan")}, r"beta: expected a finite number above 0"),
        (
            PAIRS,
            {"kind": "slic"},
            r"one of 'sigmoid', .* 'hinge', got 's",
        ),
        (PAIRS, {"label_smoothing": 0.5}, r"least 0 and below 0.5, got 0.5"),
        (PAIRS, {"label_smoothing": -0.1}, r"least 0 and below 0.5, got -0.1"),
        (PAIRS, {"label_smoothing": float("nan")}, r"below 0.5, got nan"),
        (
            PAIRS,
            {"kind": "ipo", "label_smoothing": 0.1},
            r"0 with kind 'ipo', which does not read it, got 0.1; leave it out",
        ),
        (
            PAIRS,
            {"kind": "hinge", "label_smoothing": SOFT},
            r"'hinge'.* got one for each pair",
        ),
        (FREE, {"kind": "ipo"}, r"sigmoid, robust or hinge without a .* got 'ipo'"),
        (PAIRS, {"kind": "robust"}, r"a number above 0 with kind 'robust', .* got 0.0"),
        (
            PAIRS,
            {"kind": "robust", "label_smoothing": SOFT},
            r"a number above 0 with kind 'robust', .* got one for each pair",
        ),
        (
            PAIRS | {"ref_chosen_logprobs": None},
            {},
            r"got no ref_chosen_logprobs; give both, or neither",
        ),
    ],
)
def test_what_no_loss_can_be_made_of(pairs, options, message):
    with pytest.raises(InputError, match=message):
        dpo_loss(pairs, **options)


def test_wrong_arrays_say_what_to_do():
    with pytest.raises(ValueError, match=r"ref_chosen_logprobs \(5,\)"):
        dpo_loss(PAIRS | {"ref_chosen_logprobs": PAIRS["ref_chosen_logprobs"][1:]})
    with pytest.raises(ValueError, match=r"chosen_logprobs: expected shape \(any\)"):
        dpo_loss({name: x[:, None] for name, x in PAIRS.items()})
    low = PAIRS["rejected_logprobs"].astype(jnp.bfloat16)
    with pytest.raises(TypeError, match=r"rejected_logprobs: expected float32, got bf"):
        dpo_loss(PAIRS | {"rejected_logprobs": low})
    with pytest.raises(ValueError, match=r"label_smoothing \(5,\)"):
        dpo_loss(label_smoothing=SOFT[1:])
    with pytest.raises(TypeError, match=r"mask: expected bool, got int32"):
        dpo_loss(mask=np.ones(6, np.int32))
    with pytest.raises(ValueError, match=r"num_pairs: expected shape \(\), got \(6,\)"):
        dpo_loss(num_pairs=jnp.ones(6))
