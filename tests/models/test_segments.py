"""Texts packed into one row are read as if each were alone."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rlhf_jax import decoder, policy
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTHS = (5, 1, 7, 3)
ROWS, WIDTH = ((0, 2), (1, 3)), 14  # texts of each row
RNG = np.random.default_rng(4)
TEXTS = [RNG.integers(0, tiny.VOCAB, length) for length in LENGTHS]
WEIGHTS = [RNG.normal(size=length).astype(np.float32) for length in LENGTHS]
for_each_family = pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)


def packed(columns, *, rows=ROWS, width=WIDTH, fill=0):
    """([rows, width] of one number per token, the segment of each token, from 1)."""
    array = np.full((len(rows), width), fill, columns[0].dtype)
    segments = np.zeros((len(rows), width), np.int32)
    for row, texts in enumerate(rows):
        start = 0
        for number, text in enumerate(texts, start=1):
            stop = start + len(columns[text])
            array[row, start:stop] = columns[text]
            segments[row, start:stop] = number
            start = stop
    return array, segments


ALONE = tuple((text,) for text in range(len(TEXTS)))


@functools.partial(jax.jit, static_argnames=("model",))
def value_and_gradient(params, *, model, tokens, segments, weights, mask=None):
    """((Σ w·(log-prob + entropy), (log-probs, entropies)), gradient)."""

    def total(params):
        output = policy.logprobs_and_entropy(
            params,
            model=model,
            tokens=tokens,
            mask=segments > 0 if mask is None else mask,
            segments=segments if mask is None else None,
            temperature=0.7,
        )
        return (weights * (output[0] + output[1])).sum(), output

    return jax.value_and_grad(total, has_aux=True)(params)


def of_texts(model, tokens, *, rows=ROWS, width=WIDTH, segmented=True):
    array, segments = packed(tokens, rows=rows, width=width)
    weights, _ = packed(WEIGHTS, rows=rows, width=width)
    return value_and_gradient(
        tiny.params(model),
        model=model,
        tokens=jnp.asarray(array, jnp.int32),
        segments=segments,
        weights=weights,
        mask=None if segmented else segments > 0,
    )


def by_text(array, *, rows=ROWS, width=WIDTH):
    """Splits a [rows, width] array into texts."""
    _, segments = packed(TEXTS, rows=rows, width=width)
    arrays = {}
    for row, texts in enumerate(rows):
        for number, text in enumerate(texts, start=1):
            arrays[text] = np.asarray(array)[row][segments[row] == number]
    return [arrays[text] for text in range(len(TEXTS))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [tiny.GPT2, pytest.param(tiny.LLAMA, marks=pytest.mark.slow)],
    ids=lambda model: model.family,
)
def test_packed_texts_have_the_log_probs_and_gradients_of_texts_alone(model):
    """Single texts have no segments, and use the ordinary program."""
    (_, together), gradient = of_texts(model, TEXTS)
    (_, apart), expected = of_texts(model, TEXTS, rows=ALONE, width=7, segmented=False)
    for left, right in zip(together, apart, strict=True):
        for mine, other in zip(
            by_text(left), by_text(right, rows=ALONE, width=7), strict=True
        ):
            np.testing.assert_allclose(mine, other, atol=1e-5)
            assert mine[0] == 0  # which nothing predicts
            assert (np.abs(mine[1:]) > 1e-3).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        gradient,
        expected,
    )


@pytest.mark.slow
@for_each_family
def test_a_text_does_not_see_its_neighbours(model):
    """Its numbers do not change by a bit with the texts before and after it."""
    (_, before), _ = of_texts(model, TEXTS)
    for changed in range(len(TEXTS)):
        others = [(text + 1) % tiny.VOCAB for text in TEXTS]
        texts = [others[i] if i == changed else TEXTS[i] for i in range(len(TEXTS))]
        (_, after), _ = of_texts(model, texts)
        for left, right in zip(before, after, strict=True):
            for i, (old, new) in enumerate(
                zip(by_text(left), by_text(right), strict=True)
            ):
                if i != changed:
                    np.testing.assert_array_equal(new, old)
                elif len(old) > 1:
                    assert np.abs(new - old).max() > 1e-4


@pytest.mark.slow
@for_each_family
def test_what_stands_at_padding_is_not_read(model):
    array, segments = packed(TEXTS)
    weights, _ = packed(WEIGHTS)
    expected, gradient = of_texts(model, TEXTS)
    for fill in (-1, 2**31 - 1, tiny.VOCAB):
        spoilt = jnp.asarray(np.where(segments > 0, array, fill), jnp.int32)
        output, other = value_and_gradient(
            tiny.params(model),
            model=model,
            tokens=spoilt,
            segments=segments,
            weights=weights,
            mask=None,
        )
        chex.assert_trees_all_equal(output, expected)
        chex.assert_trees_all_equal(other, gradient)


@pytest.mark.slow
def test_rows_may_be_wider_than_the_learned_positions():
    """Each text has the model's whole context, wherever it begins in its row."""
    model = tiny.GPT2
    count = model.max_positions  # 24
    text = RNG.integers(0, tiny.VOCAB, count)
    row = np.concatenate([text, text, text])[None]
    segments = np.repeat([1, 2, 3], count)[None].astype(np.int32)
    logprobs = jax.jit(policy.logprobs, static_argnames=("model",))
    output = logprobs(
        tiny.params(model),
        model=model,
        tokens=jnp.asarray(row, jnp.int32),
        mask=segments > 0,
        segments=segments,
    )
    first, *others = np.split(np.asarray(output)[0], 3)
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)
    alone = logprobs(
        tiny.params(model),
        model=model,
        tokens=jnp.asarray(text[None], jnp.int32),
        mask=np.ones((1, count), bool),
    )
    np.testing.assert_allclose(first, alone[0], atol=1e-5)


def test_segments_of_another_shape():
    with pytest.raises(ValueError, match=r"one shape, got .*, segments \(2, 4\)"):
        decoder.hidden_states(
            tiny.params(tiny.GPT2),
            model=tiny.GPT2,
            tokens=np.zeros((2, 5), np.int32),
            mask=np.ones((2, 5), bool),
            segments=np.ones((2, 4), np.int32),
        )


@pytest.mark.slow
def test_texts_that_share_a_beginning():
    """The shared beginning is stored once: a b, then the continuations c d and e."""
    model, params = tiny.LLAMA, tiny.params(tiny.LLAMA)
    compute = jax.jit(decoder.hidden_states, static_argnames=("model",))
    a, b, c, d, e = 3, 5, 7, 2, 11
    tokens = jnp.asarray([[a, b, c, d, e, 0]], jnp.int32)
    segments = jnp.asarray([[1, 1, 2, 2, 3, 0]], jnp.int32)
    prefixes = jnp.asarray([[0, 0, 1, 1, 1, 0]], jnp.int32)
    together = compute(
        params,
        model=model,
        tokens=tokens,
        mask=segments > 0,
        segments=segments,
        prefixes=prefixes,
    )[0]
    texts = jnp.asarray([[a, b, c, d], [a, b, e, 0]], jnp.int32)
    mask = jnp.asarray([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
    alone = compute(params, model=model, tokens=texts, mask=mask)
    np.testing.assert_allclose(together[:4], alone[0], atol=1e-5)
    np.testing.assert_allclose(together[4], alone[1, 2], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attention": "splash"},
            "attention xla, blockwise, cudnn on a mesh without",
        ),
        ({"sliding_window": 2, "local_layers": (True, True)}, "without a sliding win"),
    ],
)
def test_what_cannot_share_a_beginning_is_told(change, message):
    model = dataclasses.replace(tiny.LLAMA, **change)
    ones = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(InputError, match=message):
        jax.eval_shape(
            functools.partial(decoder.hidden_states, model=model, mask=ones > 0),
            tiny.params(tiny.LLAMA),
            tokens=ones,
            segments=ones,
            prefixes=0 * ones,
        )
