"""The update of DPO: its loss from unpacked log-probs, the ways of its reference."""

import dataclasses
import functools
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys
from tiers import one_in

from rlhf_jax import dpo, frozen, lora, masked, policy, state
from rlhf_jax.checkpoints import precomputed
from rlhf_jax.data import batches, packing
from rlhf_jax.data.examples import Example, Pair
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(8)


def words(count):
    return RNG.integers(3, toys.GPT2.vocab_size, count).tolist()


PAIRS = [
    Pair(words(1 + i % 3), [*words(i % 4), 1], [*words((3 * i) % 5), 2])
    for i in range(10)
]
WIDTH = 30
BETA = 0.4
ALGORITHM = dpo.DPO(model=toys.GPT2, optimizer=optax.sgd(0.5), beta=BETA)
PARAMS = toys.params()
OTHER = toys.params(seed=1)
update = toys.jit(dpo.update, static_argnames=("dpo",))
reference_of = toys.jit(dpo.reference_logprobs, static_argnames=("dpo",))


def whole(width):
    """All pairs in one batch."""
    rows = packing.pack(PAIRS, width=width)
    [batch] = packing.packed_in_order(rows, batch_size=4 * -(-len(rows) // 4), pad_id=0)
    return batch


@pytest.fixture(scope="module")
def packed():
    batch = whole(WIDTH)
    assert batch.pairs.shape[1] > 2
    assert not batch.pairs.all()
    return batch


@pytest.fixture(scope="module")
def reference():
    return toys.freeze(OTHER)


def leads(params, ref_params, *, model, temperature=1.0, token_mean=False):
    """h of every pair in float64, from unpacked texts."""

    def of(side, params):
        examples = [Example(pair.prompt, getattr(pair, side)) for pair in PAIRS]
        [texts] = batches.sequences_in_order(examples, batch_size=10, pad_id=0)
        logprobs = toys.jit(policy.logprobs, static_argnames="model")(
            params,
            model=model,
            tokens=texts.tokens,
            mask=texts.mask,
            temperature=temperature,
        )
        sums = np.where(texts.response_mask, np.float64(logprobs), 0).sum(axis=1)
        lengths = [len(getattr(pair, side)) for pair in PAIRS]
        return sums / lengths if token_mean else sums

    chosen, rejected = (
        of(side, params) - (0 if ref_params is None else of(side, ref_params))
        for side in ("chosen", "rejected")
    )
    return chosen - rejected


def start(params=PARAMS, algorithm=ALGORITHM):
    return state.supervised_state(params, optimizer=algorithm.optimizer)


def means(stats):
    return {name: float(mean) for name, mean in masked.mean_stats(stats).items()}


measure = toys.jit(dpo.measure, static_argnames=("dpo",))


@pytest.mark.parametrize(
    ("family", "kind", "smoothing", "free"),
    [
        ("gpt2", "sigmoid", 0.0, False),
        pytest.param("llama", "sigmoid", 0.1, True, marks=pytest.mark.slow),
        pytest.param("gpt2", "ipo", 0.0, False, marks=pytest.mark.slow),
        pytest.param("llama", "hinge", 0.0, False, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_the_pairs(packed, family, kind, smoothing, free):
    model = toys.FAMILIES[family]
    params, ref_params = toys.params(model), toys.params(model, seed=1)
    algorithm = dataclasses.replace(
        ALGORITHM,
        model=model,
        kind=kind,
        label_smoothing=smoothing,
        reference_free=free,
        temperature=0.7,
    )
    reference = toys.freeze(ref_params)
    ref_logprobs = (
        None if free else reference_of(reference, batch=packed, dpo=algorithm)
    )
    stats = measure(params, batch=packed, dpo=algorithm, ref_logprobs=ref_logprobs)
    lead = leads(params, None if free else ref_params, model=model, temperature=0.7)
    terms, _ = oracles.dpo_pairs(lead, BETA, kind, np.full(10, smoothing))
    numbers = means(stats)
    assert numbers["loss/dpo"] == pytest.approx(np.mean(terms), rel=1e-4)
    assert numbers["dpo/margin"] == pytest.approx(BETA * lead.mean(), rel=1e-3)
    assert numbers["dpo/accuracy"] == pytest.approx((lead > 0).mean())


def test_padding_of_packed_pairs_is_segment_0(packed):
    np.testing.assert_array_equal(packed.mask, np.asarray(packed.segments) != 0)
    assert not packed.mask.all()


def test_ipo_of_means_over_tokens(packed, reference):
    """By hand: h is divided by each response's length, EOS included."""
    algorithm = dataclasses.replace(ALGORITHM, kind="ipo", token_mean=True)
    ref_logprobs = reference_of(reference, batch=packed, dpo=algorithm)
    numbers = means(
        measure(PARAMS, batch=packed, dpo=algorithm, ref_logprobs=ref_logprobs)
    )
    lead = leads(PARAMS, OTHER, model=toys.GPT2, token_mean=True)
    expected = np.mean((lead - 1 / (2 * BETA)) ** 2)
    assert numbers["loss/dpo"] == pytest.approx(expected, rel=1e-4)
    assert numbers["dpo/margin"] == pytest.approx(BETA * lead.mean(), rel=1e-3)
    by_sums = np.mean((leads(PARAMS, OTHER, model=toys.GPT2) - 1 / (2 * BETA)) ** 2)
    assert abs(by_sums - expected) > 1e-2


def same_update(output, expected):
    assert means(output[1]) == pytest.approx(means(expected[1]), rel=1e-3, abs=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5),
        output[0].params,
        expected[0].params,
    )


@pytest.mark.slow
def test_however_the_pairs_are_packed_the_update_is_the_same(packed, reference):
    """One row per pair, or other packings: the loss is the mean over all pairs."""
    one = functools.partial(update, start(), dpo=ALGORITHM, reference=reference)
    expected = one(batch=packed)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected[0].params, PARAMS)
    assert max(jax.tree.leaves(moved)) > 1e-2
    order = np.random.default_rng(0).permutation(len(packed.tokens))
    same_update(one(batch=jax.tree.map(lambda leaf: leaf[order], packed)), expected)
    same_update(one(batch=whole(None)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", one_in(2, [1, 2]))
def test_however_an_update_is_cut_it_is_the_same(packed, reference, rows):
    inputs = {"batch": packed, "reference": reference}
    expected = update(start(), dpo=ALGORITHM, **inputs)
    parts = dataclasses.replace(ALGORITHM, micro_batch_size=rows)
    same_update(update(start(), dpo=parts, **inputs), expected)


@pytest.mark.slow
def test_it_starts_at_log_2_and_learns_its_pairs(packed):
    reference = toys.freeze(PARAMS)
    current, losses = start(), []
    for _ in range(60):
        current, stats = update(
            current, batch=packed, dpo=ALGORITHM, reference=reference
        )
        losses.append(means(stats)["loss/dpo"])
    assert losses[0] == pytest.approx(np.log(2), rel=1e-6)
    assert losses[-1] < 0.2
    assert means(stats)["dpo/accuracy"] == 1
    assert int(current.step) == 60


@pytest.mark.slow
def test_the_reference_is_not_moved_and_takes_no_gradient(packed, reference):
    def of(ref_logprobs):
        return dpo.loss(PARAMS, packed, ref_logprobs=ref_logprobs, dpo=ALGORITHM)[0]

    ref_logprobs = reference_of(reference, batch=packed, dpo=ALGORITHM)
    np.testing.assert_array_equal(toys.jit(jax.grad(of))(ref_logprobs), 0)

    def through(stored):
        moved = reference.replace(stored=stored)
        return dpo.reference_logprobs(moved, batch=packed, dpo=ALGORITHM).sum()

    for leaf in jax.tree.leaves(toys.jit(jax.grad(through))(OTHER)):
        np.testing.assert_array_equal(leaf, 0)


def test_the_reference_is_run_where_its_log_probs_are_not_given(packed, monkeypatch):
    def run(frozen_model, *, batch, dpo):
        return jnp.full(batch.tokens.shape, frozen_model)

    def loss_of_part(params, part, *, ref_logprobs, **options):
        return params["w"] * ref_logprobs.max(), {}

    module = import_module(dpo.update.__module__)
    monkeypatch.setattr(module, "reference_logprobs", run)
    monkeypatch.setattr(module, "loss", loss_of_part)
    logprobs = jnp.full(packed.tokens.shape, 7.0)
    for options, number in [
        ({"reference": 2.0}, 2),
        ({"base": 3.0}, 3),
        ({"base": 3.0, "ref_logprobs": logprobs}, 7),
    ]:
        for caller in (module, state):
            monkeypatch.setattr(caller, "adapted_params", lambda params, **_: params)
        current = state.supervised_state(
            {"w": jnp.ones(())}, optimizer=ALGORITHM.optimizer
        )
        after, _ = dpo.update(current, batch=packed, dpo=ALGORITHM, **options)
        assert after.params["w"] == 1 - 0.5 * number


@pytest.mark.slow
def test_garbage_changes_nothing(packed, reference):
    """Garbage in padding, in rows without a pair and in log-probs outside responses."""
    ref_logprobs = reference_of(reference, batch=packed, dpo=ALGORITHM)
    loss = toys.jit(
        lambda batch, ref_logprobs: dpo.loss(
            PARAMS, batch, ref_logprobs=ref_logprobs, dpo=ALGORITHM
        )[0]
    )
    expected = loss(packed, ref_logprobs)
    spoilt = packed.replace(tokens=np.where(packed.mask, packed.tokens, -7))
    dirty = np.where(packed.response_mask, np.asarray(ref_logprobs), np.float32(np.nan))
    np.testing.assert_array_equal(loss(spoilt, ref_logprobs), expected)
    np.testing.assert_array_equal(loss(packed, dirty), expected)


@pytest.mark.slow
def test_the_base_of_adapters_is_the_reference(packed):
    """To the bit as with an explicit reference; the first loss is log 2."""
    adapter = lora.LoRA(rank=2, alpha=4.0)
    algorithm = dataclasses.replace(ALGORITHM, lora=adapter, optimizer=optax.adam(1e-2))
    base = toys.freeze(PARAMS)
    adapters = lora.init(jax.random.key(0), model=toys.GPT2, lora=adapter)
    first = start(adapters, algorithm)
    mine, stats = update(first, batch=packed, dpo=algorithm, base=base)
    other, _ = update(
        first, batch=packed, dpo=algorithm, base=base, reference=toys.freeze(PARAMS)
    )
    assert toys.leaves_equal(mine, other)
    assert means(stats)["loss/dpo"] == pytest.approx(np.log(2), rel=1e-6)
    _, stats = update(mine, batch=packed, dpo=algorithm, base=base)
    assert means(stats)["loss/dpo"] < 0.69
    elsewhere, _ = update(
        first, batch=packed, dpo=algorithm, base=base, reference=toys.freeze(OTHER)
    )
    assert not toys.leaves_equal(mine, elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, pytest.param({"dtype": "int8"}, marks=pytest.mark.long)]
)
def test_precomputed_and_live_are_one_training_run(tmp_path, how):
    """Equal to the bit, in shuffled batches, to log-probs computed in the update."""
    reference = frozen.freeze(OTHER, **how)
    rows = packing.pack(PAIRS, width=WIDTH)
    stream = packing.packed_batches(rows, batch_size=2, seed=3, pad_id=0)
    cache = precomputed.load_or_compute(
        tmp_path,
        [row.tokens for row in rows],
        segments=[row.segments for row in rows],
        reference=reference,
        model=toys.GPT2,
        batch_size=2,
        pad_id=0,
        progress=False,
    )
    reference_of = jax.jit(functools.partial(dpo.reference_logprobs, dpo=ALGORITHM))
    step_of = jax.jit(functools.partial(dpo.update, dpo=ALGORITHM))

    def cached(batch):
        return {"ref_logprobs": cache.padded(batch.index, width=batch.tokens.shape[1])}

    def live(batch):
        return {"ref_logprobs": reference_of(reference, batch=batch)}

    def inside(batch):
        return {"reference": reference}

    ends = []
    for way in (cached, live, inside):
        current = start()
        for step in range(4):
            batch = stream[step]
            current, _ = step_of(current, batch=batch, **way(batch))
        ends.append(current)
    assert toys.leaves_equal(ends[0], ends[1])
    assert toys.leaves_equal(ends[0], ends[2])
    assert not toys.leaves_equal(ends[0].params, PARAMS)


@pytest.mark.slow
def test_log_probs_of_packed_rows_are_kept_apart_from_those_of_others(tmp_path):
    """The same tokens as one text or as two texts get different cache files."""
    options = {
        "reference": frozen.freeze(OTHER),
        "model": toys.GPT2,
        "batch_size": 1,
        "pad_id": 0,
        "progress": False,
    }
    rows, segments = [[3, 4, 5, 6]], [[1, 1, 2, 2]]
    one = precomputed.load_or_compute(tmp_path, rows, **options)
    two = precomputed.load_or_compute(tmp_path, rows, segments=segments, **options)
    assert one.row(0)[2] != 0
    assert two.row(0)[2] == 0
    assert one.row(0)[1] == pytest.approx(two.row(0)[1], abs=1e-6)
    np.testing.assert_array_equal(two.padded([0, -1], width=5)[1], 0)
    with pytest.raises(InputError, match=r"expected 1 to 24 tokens, .* got 25"):
        precomputed.load_or_compute(
            tmp_path, [[3] * 48], segments=[[1] * 25 + [2] * 23], **options
        )
    with pytest.raises(ValueError, match=r"a segment for each of its 4 tokens, got 3"):
        precomputed.load_or_compute(
            tmp_path, rows, segments=[segments[0][1:]], **options
        )


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_moves_nothing(packed):
    broken = toys.freeze(jax.tree.map(lambda leaf: leaf * jnp.nan, OTHER))
    current, stats = update(start(), batch=packed, dpo=ALGORITHM, reference=broken)
    assert toys.leaves_equal(current.params, PARAMS)
    assert int(current.skipped) == 1
    assert means(stats)["update/skipped"] == 1


FREE = dataclasses.replace(ALGORITHM, reference_free=True)


def test_references_that_are_missing_or_would_not_be_read(packed, reference):
    ref_logprobs = np.zeros(packed.tokens.shape, np.float32)

    def of(algorithm, **inputs):
        rehearse = functools.partial(dpo.update, dpo=algorithm)
        return jax.eval_shape(rehearse, start(), batch=packed, **inputs)

    with pytest.raises(InputError, match="expected ref_logprobs, as DPO is a loss of"):
        of(ALGORITHM)
    with pytest.raises(InputError, match="no reference with reference_free, got one"):
        of(FREE, reference=reference)
    with pytest.raises(InputError, match="no reference with ref_logprobs, got one"):
        of(ALGORITHM, reference=reference, ref_logprobs=ref_logprobs)
    with pytest.raises(InputError, match="no ref_logprobs with reference_free, got so"):
        of(FREE, ref_logprobs=ref_logprobs)
    with pytest.raises(ValueError, match=r"logprobs \(\d, \d+\), tokens \(\d, \d+\)"):
        of(ALGORITHM, ref_logprobs=ref_logprobs[:, 1:])
    with pytest.raises(InputError, match="micro_batch_size to divide the"):
        of(dataclasses.replace(FREE, micro_batch_size=3))
    with pytest.raises(InputError, match="base and lora together, got no lora"):
        of(ALGORITHM, base=reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "beta: expected a finite number above 0"),
        ({"kind": "slic"}, "kind: expected one of"),
        ({"kind": "hinge", "label_smoothing": 0.1}, "0 with kind 'hinge'"),
        ({"label_smoothing": 0.6}, "at least 0 and below 0.5"),
        ({"temperature": 0.0}, "temperature: expected"),
        ({"token_mean": True}, "token_mean: expected False with kind 'sigmoid'"),
        (
            {"kind": "simpo", "token_mean": True},
            "token_mean: .* 'simpo', which always takes the mean",
        ),
        ({"kind": "robust"}, "label_smoothing: expected a number above 0 with kind"),
        (
            {"kind": "kto", "label_smoothing": 0.1},
            "label_smoothing: expected none with kind 'kto', which does not read it",
        ),
        ({"target_margin": 0.5}, "target_margin: expected none with kind 'sigmoid'"),
        ({"target_margin": -1.0}, "target_margin: expected a finite number, 0 or"),
        ({"desirable_weight": 2.0}, "desirable_weight: expected none with kind 'sig"),
        (
            {"kind": "simpo", "undesirable_weight": 2.0},
            "undesirable_weight: expected none with kind 'simpo'",
        ),
        ({"kind": "kto", "desirable_weight": 0.0}, "desirable_weight: expected a fin"),
    ],
)
def test_recipes_that_are_none(change, message):
    with pytest.raises(InputError, match=message):
        dpo.DPORecipe(**change)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ipo", "sigmoid, robust or hinge without"),
        ("kto", "False with kind 'kto', whose rewards are log-ratios"),
        ("orpo", "False with kind 'orpo', which has no reference anyway"),
    ],
)
def test_kinds_that_cannot_leave_the_reference_out(kind, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(ALGORITHM, kind=kind, reference_free=True)


def test_pairs_are_measured_against_the_base_of_adapters(packed, monkeypatch):
    """Checks which parameters are used for the reference; no model is run."""
    base, references = toys.freeze(PARAMS), []
    updating = import_module("rlhf_jax.algorithms.dpo.update")
    adapted = dataclasses.replace(ALGORITHM, lora=lora.LoRA(rank=2))

    def reference_logprobs(reference, *, batch, dpo):
        references.append(reference)
        return "of the base"

    def loss(params, batch, *, ref_logprobs, dpo):
        return None, ref_logprobs

    monkeypatch.setattr(updating, "reference_logprobs", reference_logprobs)
    monkeypatch.setattr(updating, "loss", loss)
    monkeypatch.setattr(updating, "adapted_params", lambda *_, **__: None)
    assert dpo.measure(None, batch=packed, dpo=adapted, base=base) == "of the base"
    assert references == [base]
    known = dpo.measure(None, batch=packed, dpo=adapted, base=base, ref_logprobs=1)
    assert known == 1
    assert dpo.measure(None, batch=packed, dpo=ALGORITHM) is None
    assert len(references) == 1


def test_presets_are_those_of_the_authors():
    assert (dpo.SIMPO.kind, dpo.SIMPO.beta, dpo.SIMPO.target_margin) == ("simpo", 2, 1)
    assert (dpo.ORPO.kind, dpo.ORPO.beta) == ("orpo", 0.1)
