"""Routing of a mixture in episodes: recorded as it is run, and replayed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
import toys
from toy_episodes import (
    ROOM,
    STOP,
    Script,
    draw,
    drawn,
    prompts,
    sampler_of,
    sharing,
)

from rlhf_jax import config
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.algorithms.policy_gradient.routing_replay import RoutingReplay
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.environments import episodes, places
from rlhf_jax.models import decoder
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.generation import decode
from rlhf_jax.roles import policy

MODEL = dataclasses.replace(tiny.LLAMA, experts=config.Experts(4, 2))
REPLAY = {"routing_replay": RoutingReplay("sampler")}
LIMITS = episodes.Limits(tokens=ROOM, turn_tokens=6, turns=4)
OFTEN = {"stop_ids": tuple(range(1, 6))}  # most turns end at a stop token

routed = toys.jit(decoder.hidden_and_routing, static_argnames=("model",))
logprobs = toys.jit(policy.logprobs, static_argnames=("model",))


@functools.cache
def params():
    return tiny.params(MODEL)


def check_record(rollout):
    """Asserts the choices of a whole pass for every token but the last of each row."""
    _, routing = routed(params(), model=MODEL, tokens=rollout.tokens, mask=rollout.mask)
    record, mask = np.asarray(rollout.experts), np.asarray(rollout.mask)
    assert record.dtype == np.int32
    ran = mask.copy()
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    ran[np.arange(len(ran)), last] = False
    np.testing.assert_array_equal(record[ran], np.asarray(routing.chosen)[ran])
    assert (record[~ran] == OWN).all()


@pytest.fixture(scope="module")
def whole():
    return drawn(MODEL, params(), Script(), limits=LIMITS, **OFTEN, **REPLAY)


def test_every_token_that_is_run_is_recorded_once(whole):
    check_record(whole.rollout)
    assert whole.rollout.observed.sum() > 5  # turns follow observations
    assert whole.scores.parts["turns"].max() >= 3


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, MeshShape(data=2), MeshShape(tensor=2)])
def test_a_record_follows_its_row(shape, whole, monkeypatch):
    """Rows wait on the host, return to any place, and use places of others."""
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    late = Script(latency=lambda row, turn: 0.02 * (row < 3))
    mesh, own = None, params()
    if shape is not None:
        mesh = shape.make(jax.devices()[: shape.size])
        own = sharding.place(own, mesh=mesh)
    sampler = sampler_of(
        MODEL, late, places=2, mesh=mesh, limits=LIMITS, **OFTEN, **REPLAY
    )
    parked, take = [], sampler.programs.take

    def taken(*, place):
        rows = take(place=place)
        parked.append((place < sampler.programs.places).sum())
        return rows

    monkeypatch.setattr(sampler.programs, "take", taken)
    for _ in range(2):  # in the places of the rollout before
        rollout = draw(sampler, own).rollout
        np.testing.assert_array_equal(rollout.tokens, whole.rollout.tokens)
        np.testing.assert_array_equal(rollout.experts, whole.rollout.experts)
    assert sum(parked) >= 2


@pytest.mark.slow
def test_rows_that_copy_a_prompt_have_its_record():
    """Only row 0 reads the first columns of a prompt of five."""
    sampler = sampler_of(MODEL, Script(), limits=LIMITS, **OFTEN, **REPLAY)
    shared = sharing([0, 0, 0, 0, 4, 5], sample=[0, 1, 2, 3, 0, 0])
    output = sampler(params(), Request(shared, jax.random.key(7)))
    check_record(output.rollout)


@pytest.mark.slow
def test_the_record_of_one_turn_is_that_of_a_plain_batch():
    limits = episodes.Limits(tokens=ROOM, turn_tokens=ROOM, turns=1)
    rollout, _ = drawn(MODEL, params(), Script(turns=1), limits=limits, **REPLAY)
    batch = prompts()
    key, _ = jax.random.split(jax.random.key(7))
    generated = decode.generate(
        params(),
        model=MODEL,
        tokens=jnp.asarray(batch.tokens),
        mask=jnp.asarray(batch.mask),
        keys=decode.row_keys(key, index=batch.index, sample=batch.sample),
        max_new_tokens=ROOM,
        stop_ids=(STOP,),
        record_experts=True,
    )
    np.testing.assert_array_equal(rollout.tokens, generated.tokens)
    np.testing.assert_array_equal(rollout.experts, generated.experts)


@pytest.mark.slow
def test_an_episode_that_the_clock_ends_has_a_record_of_what_was_run(monkeypatch):
    """Of a turn under way the last token is drawn, but not run."""
    sampler = sampler_of(
        MODEL, Script(), limits=LIMITS._replace(seconds=0.0), **OFTEN, **REPLAY
    )
    end, advance = episodes.Play._end_late, sampler.programs.advance

    def end_in_a_turn(self, waiting):
        while waiting:
            self._begin(waiting.pop())
        while self._read():
            pass
        end(self, waiting)

    monkeypatch.setattr(episodes.Play, "_end_late", end_in_a_turn)
    monkeypatch.setattr(
        sampler.programs,
        "advance",
        lambda *, until, steps: advance(until=until, steps=2),
    )
    rollout, scores = draw(sampler, params())
    check_record(rollout)
    assert (scores.parts["late"] == 1).all()
    assert (rollout.response_mask.sum(axis=1) >= 1).all()


@pytest.mark.slow
def test_replayed_logprobs_are_those_of_forced_experts(whole):
    """After an update, whose routers would choose others."""
    rollout = whole.rollout
    moved = toys.perturbed(params(), seed=1, scale=0.1)
    _, routing = routed(moved, model=MODEL, tokens=rollout.tokens, mask=rollout.mask)
    recorded = np.asarray(rollout.experts) != OWN
    assert (np.asarray(routing.chosen) != rollout.experts)[recorded].mean() > 0.05
    output = logprobs(
        moved,
        model=MODEL,
        tokens=rollout.tokens,
        mask=rollout.mask,
        experts=rollout.experts,
    )
    arrays = jax.tree.map(np.asarray, moved)
    distance = 0.0
    free = logprobs(moved, model=MODEL, tokens=rollout.tokens, mask=rollout.mask)
    for row in range(len(rollout.tokens)):
        own = np.asarray(rollout.mask[row])
        text = np.asarray(rollout.tokens[row])[own].tolist()
        logits = oracles.decoder_logits(
            # The last token predicts nothing.
            arrays,
            MODEL,
            text[:-1],
            np.asarray(rollout.experts[row])[own][:-1],
        )
        expected = oracles.token_logprobs(
            np.concatenate([logits, logits[:1]])[None], np.array([text])
        )
        np.testing.assert_allclose(output[row][own], expected[0], atol=1e-4)
        distance = max(distance, np.abs(np.asarray(free[row])[own] - expected[0]).max())
    assert distance > 0.01  # the routers' own choice is another policy
