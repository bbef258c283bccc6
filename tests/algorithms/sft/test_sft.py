import dataclasses
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import batch, masked, sft, state
from rlhf_jax.functional import checks

OPTIMIZER = optax.adam(3e-2)
PARAMS = toys.params()
update = toys.jit(
    sft.update, static_argnames=("model", "optimizer", "micro_batch_size")
)


@pytest.fixture(scope="module")
def texts():
    """Texts with prompts of 2 tokens, except row 3, which is all response."""
    mask = masked.lengths_to_mask(jnp.asarray([6, 3, 5, 4], jnp.int32), size=6)
    tokens = np.random.default_rng(3).integers(0, 13, (4, 6))
    starts = jnp.asarray([2, 2, 2, 0])
    return batch.Sequences(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=mask,
        response_mask=mask & (jnp.arange(6)[None, :] >= starts[:, None]),
    )


@toys.jit
def loss(params, texts):
    return sft.loss(
        params,
        texts,
        model=toys.GPT2,
        num_tokens=sft.predicted(texts).sum(dtype=jnp.float32),
    )


def test_the_loss_is_of_response_tokens_alone(texts):
    logits = toys.logits(PARAMS, model=toys.GPT2, tokens=texts.tokens, mask=texts.mask)
    logprobs = oracles.token_logprobs(
        np.asarray(logits, np.float64), np.asarray(texts.tokens)
    )
    trained = np.array(  # nothing predicts the first token of row 3
        [[0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0]]
    ).astype(bool)
    np.testing.assert_array_equal(sft.predicted(texts), trained)
    value, stats = loss(PARAMS, texts)
    expected = oracles.language_model_loss(logprobs, trained)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    total, weight = stats["loss/language_model"]
    np.testing.assert_allclose(total / weight, expected, rtol=1e-5)
    assert int(weight) == trained.sum()


def test_an_update_divides_by_all_tokens_that_are_predicted(texts, monkeypatch):
    def loss_of_part(params, part, *, model, num_tokens):
        return params["w"] * num_tokens, {"tokens": (num_tokens, jnp.ones(()))}

    monkeypatch.setattr(import_module(sft.update.__module__), "loss", loss_of_part)
    optimizer = optax.sgd(0.5)
    start = state.supervised_state({"w": jnp.ones(())}, optimizer=optimizer)
    after, stats = sft.update(start, batch=texts, model=toys.GPT2, optimizer=optimizer)
    assert masked.mean_stats(stats)["tokens"] == 11
    assert after.params["w"] == 1 - 0.5 * 11


def test_nothing_predicts_the_first_token_of_a_text_in_a_packed_row():
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0]], jnp.int32)
    packed = batch.Sequences(
        tokens=jnp.ones((1, 6), jnp.int32),
        mask=segments > 0,
        response_mask=segments > 0,
        segments=segments,
    )
    predicted = sft.predicted(packed)
    np.testing.assert_array_equal(predicted, [[False, True, False, True, True, False]])


def test_texts_of_a_packed_row_do_not_see_each_other():
    """Four texts of 3 tokens in two rows (with two empty rows) and in four rows."""
    tokens = np.random.default_rng(5).integers(3, 13, (4, 3))
    nothing = np.zeros((4, 3), int)
    apart = np.concatenate([tokens, nothing], axis=1)
    packed = np.concatenate([tokens.reshape(2, 6), nothing.reshape(2, 6)])
    of_text = np.asarray([[1, 1, 1, 2, 2, 2]] * 2 + [[0] * 6] * 2)

    def texts_of(tokens, *, mask, segments=None):
        mask = jnp.asarray(mask)
        return batch.Sequences(
            tokens=jnp.asarray(tokens, jnp.int32),
            mask=mask,
            response_mask=mask,
            segments=None if segments is None else jnp.asarray(segments, jnp.int32),
        )

    value, _ = loss(PARAMS, texts_of(packed, mask=of_text > 0, segments=of_text))
    expected, _ = loss(PARAMS, texts_of(apart, mask=apart > 0))
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.slow
def test_the_loss_falls(texts):
    current, losses = state.supervised_state(PARAMS, optimizer=OPTIMIZER), []
    for _ in range(30):
        current, stats = update(
            current, batch=texts, model=toys.GPT2, optimizer=OPTIMIZER
        )
        losses.append(float(masked.mean_stats(stats)["loss/language_model"]))
    assert losses[-1] < 0.2 * losses[0]
    assert int(current.step) == 30
    assert stats.keys() == {
        "loss/language_model",
        "update/grad_norm",
        "update/skipped",
        "update/skipped_in_a_row",
    }


@pytest.mark.slow
def test_padding_and_prompts_are_not_learned(texts):
    """Tokens under the padding have no effect, on either side."""
    other = dataclasses.replace(texts, tokens=jnp.where(texts.mask, texts.tokens, 12))
    value, _ = loss(PARAMS, texts)
    np.testing.assert_array_equal(loss(PARAMS, other)[0], value)
    left = jax.tree.map(
        lambda leaf: jnp.stack(
            [jnp.roll(leaf[b], 6 - n) for b, n in enumerate((6, 3, 5, 4))]
        ),
        texts,
    )
    np.testing.assert_allclose(loss(PARAMS, left)[0], value, rtol=1e-5)


def test_a_micro_batch_size_that_does_not_divide(texts):
    with pytest.raises(
        checks.InputError, match="divide the 4 rows of an update, got 3"
    ):
        update(
            state.supervised_state(PARAMS, optimizer=OPTIMIZER),
            batch=texts,
            model=toys.GPT2,
            optimizer=OPTIMIZER,
            micro_batch_size=3,
        )


def test_a_part_is_divided_by_the_tokens_of_the_whole(texts, monkeypatch):
    """No model is run: every token has a log-prob of -1."""
    monkeypatch.setattr(
        import_module("rlhf_jax.algorithms.sft.update").policy,
        "logprobs",
        lambda *_, tokens, **__: jnp.full(tokens.shape, -1.0),
    )
    count = int(sft.predicted(texts).sum())
    for total, expected in ((count, 1.0), (2 * count, 0.5)):
        output, _ = sft.loss(None, texts, model=None, num_tokens=jnp.float32(total))
        assert float(output) == pytest.approx(expected, rel=1e-6)
