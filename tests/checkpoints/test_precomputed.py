"""Cached reference log-probs of a fixed data set equal live ones."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toys

from rlhf_jax import frozen, masked, policy
from rlhf_jax.checkpoints import precomputed
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Example
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.reference.frozen import ReferenceMovedError

MODEL = toys.GPT2
RNG = np.random.default_rng(0)
ROWS = [
    RNG.integers(0, MODEL.vocab_size, length).tolist() for length in (5, 1, 9, 4, 7, 2)
]
REFERENCE = toys.freeze(toys.params())


def load(folder, rows=ROWS, **changes):
    options = {
        "reference": REFERENCE,
        "model": MODEL,
        "batch_size": 4,
        "pad_id": 0,
        "temperature": 0.7,
        "progress": False,
    }
    return precomputed.load_or_compute(folder, rows, **(options | changes))


@pytest.fixture
def never(monkeypatch):
    """Forbids further computation once called."""

    def refuse(*args, **kwargs):
        raise AssertionError("it was computed again")

    def forbid():
        monkeypatch.setattr(precomputed, "_logprobs", refuse)

    return forbid


def test_every_row_is_what_its_logits_say(tmp_path):
    cache = load(tmp_path)
    mask = masked.lengths_to_mask(
        jnp.asarray([len(row) for row in ROWS]), size=max(map(len, ROWS))
    )
    tokens = np.zeros(mask.shape, np.int32)
    tokens[np.asarray(mask)] = np.concatenate(ROWS)
    logits = toys.logits(
        toys.params(), model=MODEL, tokens=jnp.asarray(tokens), mask=mask
    )
    logprobs = np.asarray(jax.nn.log_softmax(logits / 0.7), np.float64)
    for place, row in enumerate(ROWS):
        expected = [
            0.0,
            *(logprobs[place, t, token] for t, token in enumerate(row[1:])),
        ]
        np.testing.assert_allclose(cache.row(place), expected, atol=2e-5)


STORED = {"dtype": "int8", "memory": "pinned_host"}


@pytest.mark.parametrize("how", [{}, pytest.param(STORED, marks=pytest.mark.slow)])
def test_a_cache_equals_live_log_probs_to_the_bit(tmp_path, how, never):
    """In other batches of the same shape, shuffled as in training."""
    reference = frozen.freeze(toys.params(), **how)
    load(tmp_path, reference=reference)
    never()
    cache = load(tmp_path, reference=reference)
    live = jax.jit(
        lambda reference, tokens, mask: policy.logprobs(
            frozen.read(reference),
            model=MODEL,
            tokens=tokens,
            mask=mask,
            temperature=0.7,
        )
    )
    for rows in ([4, 2, 0, 5], [2, 1, 3, 0]):
        (batch,) = batches.sequences_in_order(
            [Example((), ROWS[row]) for row in rows], batch_size=4, pad_id=0
        )
        expected = live(reference, batch.tokens, batch.mask)
        ours = cache.padded(rows, width=batch.tokens.shape[1])
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.slow
def test_any_other_model_data_or_temperature_is_another_file(tmp_path, never):
    first = load(tmp_path)
    other = frozen.freeze(toys.params(seed=1))
    changes = [
        {"reference": other},
        {"reference": frozen.freeze(toys.params(), dtype="bfloat16")},
        {"model": tiny.bfloat16(MODEL)},
        {"temperature": 1.0},
        {"rows": ROWS[::-1]},
        {"rows": [[*ROWS[0][:-1], (ROWS[0][-1] + 1) % 13], *ROWS[1:]]},
    ]
    caches = [np.array(load(tmp_path, **change).logprobs) for change in changes]
    for values in caches:
        assert not np.array_equal(values, first.logprobs)
    assert len(list(tmp_path.glob("*.npy"))) == len(changes) + 1
    never()
    np.testing.assert_array_equal(load(tmp_path).logprobs, first.logprobs)
    for change, values in zip(changes, caches, strict=True):
        np.testing.assert_array_equal(load(tmp_path, **change).logprobs, values)
    with pytest.raises(AssertionError, match="computed again"):
        load(tmp_path, temperature=0.9)


@pytest.mark.slow
def test_another_batch_size_is_another_file(tmp_path):
    """Its numbers may differ in the last bit only."""
    caches = [load(tmp_path, batch_size=size).logprobs for size in (4, 1)]
    assert len(list(tmp_path.glob("*.npy"))) == 2
    np.testing.assert_allclose(*caches, atol=1e-5)


def test_what_a_killed_run_left_is_not_taken_for_whole(tmp_path, monkeypatch):
    whole = np.array(load(tmp_path / "whole").logprobs)
    calls = []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compute(*args, **kwargs)

    compute = precomputed._logprobs
    monkeypatch.setattr(precomputed, "_logprobs", killed)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path / "killed")
    np.testing.assert_array_equal(load(tmp_path / "killed").logprobs, whole)
    # Killed between the two files: the numbers are there, but nothing vouches for them.
    (about,) = (tmp_path / "killed").glob("*.json")
    (values,) = (tmp_path / "killed").glob("*.npy")
    about.unlink()
    values.write_bytes(b"half")
    np.testing.assert_array_equal(load(tmp_path / "killed").logprobs, whole)
    assert len(calls) == 2 + 2 + 2


def spoil_values(values, about):
    raw = bytearray(values.read_bytes())
    raw[-3] ^= 1
    values.write_bytes(raw)


def cut_values(values, about):
    values.write_bytes(values.read_bytes()[:-4])


def remove_values(values, about):
    values.unlink()


def spoil_about(values, about):
    about.write_text(json.dumps({"sha256": None}))


def cut_about(values, about):
    about.write_text(about.read_text()[:-20])


@pytest.mark.parametrize(
    "spoil", [spoil_values, cut_values, remove_values, spoil_about, cut_about]
)
def test_a_damaged_cache_is_told(tmp_path, spoil):
    load(tmp_path)
    (values,), (about,) = tmp_path.glob("*.npy"), tmp_path.glob("*.json")
    spoil(values, about)
    with pytest.raises(InputError, match=f"{values.name}: .* remove both files"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "expected at least one row, got none; give texts"),
        ([[1], []], r"row 1 .from 0.: expected 1 to 24 tokens, .* got 0; shorten or"),
        (
            [[1] * 25],
            r"row 0 .from 0.: expected 1 to 24 tokens, the reference's context",
        ),
        ([[1, 13]], "expected token ids below 13, the reference's vocabulary, got 13"),
        ([[-1]], "expected token ids below 13"),
    ],
)
def test_rows_that_the_reference_cannot_score(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        load(tmp_path / "cache", rows)
    assert not (tmp_path / "cache").exists()


def test_a_moved_or_broken_reference_is_not_cached(tmp_path):
    moved = REFERENCE.replace(stored=toys.params(seed=1))
    with pytest.raises(ReferenceMovedError):
        load(tmp_path, reference=moved)
    nan = frozen.freeze(jax.tree.map(lambda x: x * jnp.nan, toys.params()))
    with pytest.raises(StopError, match="expected finite log-probs"):
        load(tmp_path, reference=nan)
    assert not list(tmp_path.glob("*.json"))


def test_rows_are_not_cut(tmp_path):
    with pytest.raises(ValueError, match="broadcast"):
        load(tmp_path).padded([0, 2], width=8)


@pytest.mark.slow
def test_another_shape_of_one_fingerprint_has_a_file_of_its_own(tmp_path):
    """Parameters alone do not determine the number of heads."""
    one = load(tmp_path)
    heads = dataclasses.replace(MODEL, num_heads=4, num_kv_heads=4, head_dim=4)
    other = load(tmp_path, model=heads)
    assert not np.array_equal(one.logprobs, other.logprobs)
