"""Prompts read in chunks of columns, against the whole pass."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import toys

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import cached_decoder
from rlhf_jax.models.generation import decode

LOCAL = dataclasses.replace(
    toys.LLAMA, num_layers=2, sliding_window=3, local_layers=(True, False)
)
PROMPTS = toys.prompts((7, 2, 5, 1), width=7)


def prefilled(model, chunk, params):
    run = functools.partial(
        cached_decoder.prefill, model=dataclasses.replace(model, prefill_chunk=chunk)
    )
    return toys.jit(run)(params, tokens=PROMPTS.tokens, mask=PROMPTS.mask)


@pytest.mark.slow
@pytest.mark.parametrize("model", [toys.GPT2, LOCAL], ids=["gpt2", "local layers"])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_give_the_whole_pass(model, chunk):
    params = toys.params(model)
    hidden, caches, _ = prefilled(model, None, params)
    output, chunked, _ = prefilled(model, chunk, params)
    np.testing.assert_allclose(output, hidden, rtol=1e-5, atol=1e-5)
    assert chunked.keys() == caches.keys() == {"attention"}
    for one, other in zip(chunked["attention"], caches["attention"], strict=True):
        visible = np.asarray(PROMPTS.mask)[None, :, None, :, None]
        np.testing.assert_allclose(
            np.where(visible, one, 0), np.where(visible, other, 0), rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("batching", [None, 2])
def test_samples_are_the_same(batching):
    def sample(chunk):
        model = dataclasses.replace(LOCAL, prefill_chunk=chunk)
        generate = functools.partial(
            decode.generate,
            model=model,
            max_new_tokens=toys.SIZE,
            stop_ids=toys.STOP,
            continuous_batching=batching,
        )
        keys = decode.row_keys(
            jax.random.key(2), index=PROMPTS.index, sample=PROMPTS.sample
        )
        return toys.jit(generate)(
            toys.params(LOCAL), tokens=PROMPTS.tokens, mask=PROMPTS.mask, keys=keys
        )

    output, expected = sample(2), sample(None)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow
def test_memory_follows_the_chunk_and_not_the_prompt():
    model = dataclasses.replace(toys.LLAMA, max_positions=2048, hidden_size=64)
    shapes = jax.eval_shape(
        lambda: (
            toys.params.__wrapped__(model),
            np.zeros((2, 2048), np.int32),
            np.ones((2, 2048), bool),
        )
    )

    def temporary(chunk):
        run = functools.partial(
            cached_decoder.prefill,
            model=dataclasses.replace(model, prefill_chunk=chunk),
        )
        compiled = (
            jax.jit(lambda params, tokens, mask: run(params, tokens=tokens, mask=mask))
            .lower(*shapes)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(64) < temporary(512) / 2 < temporary(None) / 4


def test_a_chunk_of_nothing():
    with pytest.raises(InputError, match=r"prefill_chunk: expected .* got 0"):
        dataclasses.replace(toys.LLAMA, prefill_chunk=0)
