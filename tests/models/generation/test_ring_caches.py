"""Layers with a sliding window: a ring of its columns against a full cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from places import FIXTURES

from rlhf_jax import decode, hf
from rlhf_jax.models import cached_decoder, caches
from rlhf_jax.planning import workload

LENGTHS, PROMPT, NEW = (8, 3, 1, 5, 7, 2, 8, 4), 8, 14
INDEX = np.arange(len(LENGTHS), dtype=np.int32)
FAMILIES = [
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "mistral",
    "phi3",
    "qwen2",
    "olmo3",
    "smollm3",
]


def sampled(model, params, *, stop_ids=(), **options):
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    run = functools.partial(
        decode.generate,
        model=model,
        max_new_tokens=NEW,
        stop_ids=stop_ids,
        temperature=0.8,
        **options,
    )
    keys = decode.row_keys(jax.random.key(1), index=INDEX, sample=INDEX % 3)
    return jax.jit(run)(params, tokens=tokens, mask=mask, keys=keys)


def sampled_from_all_columns(model, params, **options):
    """Samples with full caches in every layer."""

    def within_the_window(attend, *, window, column):
        return attend & (jnp.arange(attend.shape[1]) > column - window)[None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "width", lambda model, layer, *, columns: columns)
        patch.setattr(cached_decoder, "near", within_the_window)
        return sampled(model, params, **options)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cache", ["same", "int8"])
def test_a_ring_draws_what_all_columns_do(name, cache, monkeypatch):
    """Prompts exceed the window of 5, and responses several times."""
    monkeypatch.setattr(caches, "FIRST_WIDTH", 1)  # caches that grow twice
    model, params = hf.load(FIXTURES / name, dtype="float32")
    model = dataclasses.replace(model, cache=cache)
    assert model.sliding_window == 5
    stops = tuple(range(8))
    expected = sampled_from_all_columns(model, params, stop_ids=stops)
    lengths = np.asarray(expected.response_mask).sum(axis=1)
    assert lengths.min() < 5 < lengths.max()
    for places in (None, 3):
        output = sampled(model, params, stop_ids=stops, continuous_batching=places)
        np.testing.assert_array_equal(output.tokens, expected.tokens)
        np.testing.assert_array_equal(output.mask, expected.mask)
        np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.parametrize("cache", ["same", "int8"])
def test_memory_of_a_local_layer_follows_its_window(cache):
    """Two of three layers see 4 tokens; a vector has 48 bytes, in int8 12 + 4."""
    model = dataclasses.replace(tiny.MIXED, cache=cache)
    vector = {"same": 12 * 4, "int8": 12 + 4}[cache]
    for columns in (40, 400):
        size = workload.cache_bytes(model, rows=3, columns=columns)
        assert size == 2 * 3 * (4 + columns + 4) * vector
