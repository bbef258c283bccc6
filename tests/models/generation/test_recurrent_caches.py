"""Recurrent layers in every decoding mode: a state has only its row's tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
import toys
from test_episode_places import CHUNK, arriving, begun, programs

from rlhf_jax import decode, policy
from rlhf_jax.models import caches
from rlhf_jax.models.generation.episode_places import copied

MODEL = tiny.HYBRID
LENGTHS, PROMPT, NEW, STOPS = (6, 3, 1, 5, 2, 4, 6, 1, 2), 6, 9, (2, 7)
ROWS = len(LENGTHS)


def sampled(model=MODEL, *, group_size=1, **options):
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    if group_size > 1:
        tokens, mask = (np.repeat(x[:3], group_size, axis=0) for x in (tokens, mask))
    index = np.arange(ROWS, dtype=np.int32)
    run = functools.partial(
        decode.generate,
        model=model,
        max_new_tokens=NEW,
        stop_ids=STOPS,
        group_size=group_size,
        **options,
    )
    keys = decode.row_keys(jax.random.key(0), index=index, sample=index % 3)
    return toys.jit(run)(tiny.params(MODEL), tokens=tokens, mask=mask, keys=keys)


@functools.cache
def expected():
    return sampled()


@functools.cache
def whole_pass():
    return toys.jit(functools.partial(policy.logprobs, model=MODEL))


def assert_same(output, other):
    for name in ("tokens", "mask", "response_mask"):
        np.testing.assert_array_equal(getattr(output, name), getattr(other, name))
    for name in ("logprobs", "entropy"):
        np.testing.assert_allclose(
            getattr(output, name), getattr(other, name), atol=1e-5
        )


def test_log_probs_are_those_of_a_whole_pass():
    drawn = np.asarray(expected().response_mask)
    assert 1 <= drawn.sum(axis=1).min() < drawn.sum(axis=1).max() == NEW
    whole = whole_pass()(
        tiny.params(MODEL), tokens=expected().tokens, mask=expected().mask
    )
    np.testing.assert_allclose(
        expected().logprobs, np.where(drawn, whole, 0.0), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "batching"),
    [
        ({"prefill_chunk": 4}, {}),
        pytest.param({}, {"continuous_batching": 3}, marks=pytest.mark.slow),
        # The fewest pages, so that rows wait, and their states with them.
        ({"cache_pages": 5, "page_size": 3}, {"continuous_batching": 4}),
        pytest.param({"unroll": True}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"cache_pages": 7, "page_size": 3, "prefill_chunk": 4},
            {"continuous_batching": 5},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["chunks", "places", "pages", "unrolled", "pages and chunks"],
)
def test_samples_are_those_of_a_plain_batch(options, batching):
    model = dataclasses.replace(MODEL, **options)
    assert_same(sampled(model, **batching), expected())


@pytest.mark.slow
def test_a_group_runs_its_prompt_once():
    plain = sampled(group_size=3)
    assert_same(sampled(group_size=3, continuous_batching=6), plain)


@pytest.mark.slow
def test_a_cache_in_int8_keeps_states_as_they_are():
    model = dataclasses.replace(MODEL, cache="int8")
    state = caches.blank_state(model, rows=2)
    [kept] = caches.placed([state], model=model, columns=8, end=4)
    assert kept is state
    output = sampled(model)
    drawn = np.asarray(output.response_mask)
    whole = whole_pass()(tiny.params(MODEL), tokens=output.tokens, mask=output.mask)
    np.testing.assert_allclose(output.logprobs, np.where(drawn, whole, 0.0), atol=0.05)


# Episodes: prompts of several chunks, turns, an observation, places that wait.


def assert_a_whole_pass(state):
    """Asserts that each place's samples have the log-probs of a full pass."""
    mask = np.arange(state.tokens.shape[1])[None] < np.asarray(state.length)[:, None]
    drawn = np.asarray(state.sampled) & mask
    expected = whole_pass()(tiny.params(MODEL), tokens=state.tokens, mask=mask)
    np.testing.assert_allclose(
        np.where(drawn, state.logprobs, 0.0), np.where(drawn, expected, 0.0), atol=1e-5
    )


@pytest.mark.slow
def test_episodes_of_several_turns():
    params, (read, advance) = tiny.params(MODEL), programs(MODEL)
    state = begun(MODEL, [3, 4, 5], [6, 7], [8, 9, 1, 2], draws=[True, True, False])
    state = advance(params, state, until=np.int32(0), steps=np.int32(2))
    # The third reads on while the others wait, then all draw.
    more = dataclasses.replace(
        arriving([1, 2], [0], [5, 5, 6], draws=[False, False, True]),
        place=np.array([3, 3, 2], np.int32),  # 3 is nowhere
        begins=np.zeros(3, bool),
    )
    before = jax.device_get(state.caches)
    state = read(params, state, more)
    for old, new in zip(before, jax.device_get(state.caches), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:2], b[:2]), old, new)
    state = advance(params, state, until=np.int32(0), steps=np.int32(9))
    assert not np.asarray(state.drawing).any()
    # An observation of two tokens to the first, whose turn has ended.
    observed = dataclasses.replace(
        arriving([11, 12], [0], [0], draws=[True, False, False]),
        place=np.array([0, 3, 3], np.int32),
        begins=np.zeros(3, bool),
        prompt=np.zeros(3, bool),
    )
    state = read(params, state, observed)
    states = [kept for kept in state.caches if isinstance(kept, caches.DeltaState)]
    waits = jax.device_get([kept.memory[1:] for kept in states])
    state = advance(params, state, until=np.int32(0), steps=np.int32(3))
    for old, kept in zip(
        waits,
        (kept for kept in state.caches if isinstance(kept, caches.DeltaState)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, kept.memory[1:])
    assert (np.asarray(state.sampled)[0].sum()) > 6
    assert_a_whole_pass(state)
    # A new episode in a place that was used begins with a blank state.
    again = dataclasses.replace(
        arriving([5, 6], [0], [0], draws=[True, False, False]),
        place=np.array([0, 3, 3], np.int32),
    )
    state = advance(
        params, read(params, state, again), until=np.int32(0), steps=np.int32(4)
    )
    assert_a_whole_pass(state)


@pytest.mark.slow
def test_a_prompt_that_was_read_is_copied_with_its_state():
    state = begun(MODEL, [3, 4, 5, 1], [6, 7], [8], draws=[False, False, False])
    two = copied(
        state,
        source=np.array([0], np.int32),
        place=np.array([2], np.int32),
        keys=jax.random.split(jax.random.key(1), 1),
    )
    for kept in two.caches:
        jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[2]), kept)
    assert CHUNK == 4
