"""SimPO, ORPO and KTO as updates: what they read of a batch, in parts, without labels.

A table of log-probs stands for the model: its "parameters" are those of every token.
"""

import dataclasses

import jax
import numpy as np
import optax
import oracles
import pytest
import toys
from test_dpo import ALGORITHM, PAIRS, means

from rlhf_jax import dpo, state
from rlhf_jax.algorithms.dpo import pair_loss
from rlhf_jax.data import packing
from rlhf_jax.functional.checks import InputError

LABELS = [True, False, False, True, True, False, True, False, True, True]
SIMPO = dataclasses.replace(ALGORITHM, kind="simpo", target_margin=0.3)
ORPO = dataclasses.replace(ALGORITHM, kind="orpo")
KTO = dataclasses.replace(ALGORITHM, kind="kto", undesirable_weight=1.7)
RATE = 0.1


def whole(labels=None):
    rows = packing.pack(PAIRS, width=30)
    [batch] = packing.packed_in_order(
        rows, batch_size=len(rows), pad_id=0, labels=labels
    )
    assert len(rows) % 2 == 0
    assert not batch.pairs.all()
    return batch


def table(seed):
    """Log-probs of every token, with implausible values outside responses."""
    batch, rng = whole(), np.random.default_rng(seed)
    logprobs = -np.abs(rng.normal(1, 0.5, batch.tokens.shape))
    return np.where(batch.response_mask, logprobs, 99.0).astype(np.float32)


PARAMS, REF = table(0), table(1)


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def read(params, batch, dpo):
        return params[batch.index]

    monkeypatch.setattr(pair_loss, "token_logprobs", read)


def sums(logprobs):
    """The sums of every pair in float64, in the order of PAIRS: (chosen, rejected)."""
    both = np.zeros((2, len(PAIRS)))
    for row, packed in enumerate(packing.pack(PAIRS, width=30)):
        for number, place in enumerate(packed.places):
            for side in (0, 1):
                for column, segment in enumerate(packed.segments):
                    if segment == 2 * number + 1 + side and packed.response[column]:
                        both[side, place] += logprobs[row, column]
    return both


def lengths():
    return np.array([[len(p.chosen) for p in PAIRS], [len(p.rejected) for p in PAIRS]])


def test_labels_stand_beside_their_texts():
    batch = whole(LABELS)
    labels = np.asarray(batch.labels)
    for row, packed in enumerate(packing.pack(PAIRS, width=30)):
        shown = labels[row, : len(packed.places)]
        assert shown.tolist() == [LABELS[place] for place in packed.places]
    assert not labels[~np.asarray(batch.pairs)].any()
    assert whole().labels is None


update = toys.jit(dpo.update, static_argnames=("dpo",))


def updated(algorithm, batch, ref_logprobs=None, params=PARAMS):
    algorithm = dataclasses.replace(algorithm, optimizer=optax.sgd(RATE))
    start = state.supervised_state(jax.numpy.asarray(params), optimizer=optax.sgd(RATE))
    after, stats = update(start, batch=batch, dpo=algorithm, ref_logprobs=ref_logprobs)
    return np.asarray(after.params), means(stats)


@pytest.mark.parametrize(
    "algorithm", [SIMPO, pytest.param(ORPO, marks=pytest.mark.slow)]
)
def test_losses_without_a_reference_read_means_over_tokens(algorithm):
    chosen, rejected = sums(PARAMS) / lengths()
    expected = (
        oracles.simpo_pairs(chosen, rejected, algorithm.beta, 0.3)
        if algorithm is SIMPO
        else oracles.orpo_pairs(chosen, rejected, algorithm.beta)
    )
    parts = dataclasses.replace(algorithm, micro_batch_size=2)
    _, stats = updated(parts, whole())
    assert stats["loss/dpo"] == pytest.approx(expected.mean(), rel=1e-5)
    assert stats["dpo/chosen_logprob"] == pytest.approx(chosen.mean(), rel=1e-5)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("lift", "rows"),
    [
        (1.0, None),
        pytest.param(1.0, 2, marks=pytest.mark.slow),
        pytest.param(-1.0, None, marks=pytest.mark.slow),
        (-1.0, 2),
    ],
)
def test_kto_is_its_formula_however_it_is_cut(lift, rows):
    """z0 is the mean over the whole batch, or 0 if the mean is negative."""
    batch = whole(LABELS)
    params = np.where(batch.segments % 2 == 0, PARAMS + lift, PARAMS).astype("f4")
    (own, others), (ref_own, ref_others) = sums(params), sums(REF)
    losses, slopes, z0 = oracles.kto_texts(
        own - ref_own, np.array(LABELS), others - ref_others, KTO.beta, (1.0, 1.7)
    )
    assert (z0 > 0) == (lift > 0)
    parts = dataclasses.replace(KTO, micro_batch_size=rows)
    after, stats = updated(parts, batch, REF, params=params)
    assert stats["loss/dpo"] == pytest.approx(losses.mean(), rel=1e-5)
    assert stats["kto/kl"] == pytest.approx(z0, rel=1e-4)
    # A token of a response moves by the slope of its text, and no other does.
    moved = (params - after) / RATE
    np.testing.assert_allclose(
        sums(moved)[0] / lengths()[0], slopes / len(PAIRS), atol=1e-6
    )
    np.testing.assert_array_equal(moved[~batch.response_mask], 0)
    np.testing.assert_array_equal(sums(moved)[1], 0)


@pytest.mark.parametrize("kind", ["kto", "simpo", "orpo"])
def test_a_kind_with_a_loss_of_its_own_is_no_kind_of_dpo_loss(kind):
    with pytest.raises(InputError, match=rf"kind: expected one of .* got '{kind}'"):
        _ = dpo.DPORecipe(kind=kind).dpo_kind


def test_what_does_not_go_together():
    with pytest.raises(InputError, match="pairs with labels for kind 'kto', got oth"):
        updated(KTO, whole(), REF)
    with pytest.raises(InputError, match="pairs with no labels for kind 'sigmoid'"):
        updated(ALGORITHM, whole(LABELS), REF)
    with pytest.raises(InputError, match="no ref_logprobs with kind 'simpo', got som"):
        updated(SIMPO, whole(), REF)
    start = state.supervised_state(PARAMS, optimizer=ORPO.optimizer)
    reference = toys.freeze(toys.params())
    with pytest.raises(InputError, match="no reference with kind 'orpo', got one"):
        dpo.update(start, batch=whole(), dpo=ORPO, reference=reference)
    with pytest.raises(InputError, match="micro_batch_size to divide the"):
        updated(dataclasses.replace(KTO, micro_batch_size=3), whole(LABELS), REF)
