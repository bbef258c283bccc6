"""A queue of prompts in fewer places: the same samples, in fewer turns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import optax
import pytest
import tiny
import toys

from rlhf_jax import (
    decode,
    grpo,
    kl_control,
    policy,
    ppo,
    rollout,
    row_sharding,
    sharding,
    slots,
    state,
)
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.sampling import Shaping
from rlhf_jax.runtime.sharding import MeshShape

STATIC = (
    *("model", "max_new_tokens", "stop_ids", "temperature", "shaping"),
    *("group_size", "slots"),
)
generate = toys.jit(decode.generate, static_argnames=STATIC)
prices_of = toys.jit(
    policy.logprobs_and_entropy, static_argnames=("model", "temperature")
)
logits_of = toys.jit(policy.logits, static_argnames="model")

LENGTHS, PROMPT, NEW = (6, 3, 1, 5, 2, 4, 6, 1, 2, 3, 6), 6, 9
ROWS = len(LENGTHS)
STOPS = (2, 7)
each_family = pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)


def sampled(model, *, places=None, rows=ROWS, **options):
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    index = np.arange(rows, dtype=np.int32)
    return generate(
        options.pop("params", tiny.params(model)),
        model=model,
        tokens=options.pop("tokens", tokens[:rows]),
        mask=options.pop("mask", mask[:rows]),
        keys=options.pop(
            "keys", decode.row_keys(jax.random.key(0), index=index, sample=index % 3)
        ),
        max_new_tokens=options.pop("max_new_tokens", NEW),
        stop_ids=options.pop("stop_ids", STOPS),
        slots=places,
        **options,
    )


@functools.cache
def expected_of(model, stop_ids=STOPS):
    """Of a place for every row."""
    return sampled(model, stop_ids=stop_ids)


def assert_same(found, expected):
    for name in ("tokens", "mask", "response_mask"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("logprobs", "entropy"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), atol=1e-5
        )


@each_family
@pytest.mark.parametrize("places", [1, 3, ROWS])
def test_samples_are_those_of_a_place_for_every_row(model, places):
    expected = expected_of(model)
    lengths = np.asarray(expected.response_mask).sum(axis=1)
    assert 1 <= lengths.min() < np.median(lengths) < lengths.max()
    assert_same(sampled(model, places=places), expected)


@pytest.mark.parametrize(("places", "arriving"), [(8, 4), (6, 5), (5, 3)])
def test_prompts_come_in_several_at_a_time(places, arriving, monkeypatch):
    """Also where their number divides neither the slots nor the rows."""
    assert slots.refill_size(places, group_size=1) == 1
    monkeypatch.setattr(slots, "refill_size", lambda slots, *, group_size: arriving)
    for stop_ids in (STOPS, ()):
        found = toys.jit(decode.generate, static_argnames=STATIC)(
            tiny.params(tiny.GPT2), **inputs(stop_ids=stop_ids), slots=places
        )
        assert_same(found, expected_of(tiny.GPT2, stop_ids))
