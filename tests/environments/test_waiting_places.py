"""An episode that waits for a slow tool gives up its place without changing a bit."""

import dataclasses
import functools
import threading

import chex
import jax
import numpy as np
import pytest
import tiny
from toy_episodes import ROOM, ROWS, Script, draw, params_of, sampler_of

from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.environments import episodes, places

INT8 = dataclasses.replace(tiny.GPT2, cache="int8")
MODELS = {"int8": INT8, "mixed": tiny.MIXED, "gpt2": tiny.GPT2, "hybrid": tiny.HYBRID}


class Slow(Script):
    """Answers rows 0 and 1 once all others have ended."""

    def __init__(self, **options):
        super().__init__(**options)
        self.left, self.others = {*range(2, ROWS)}, threading.Event()

    def answer(self, state, response):
        answer = super().answer(state, response)
        if state[0] in (0, 1):
            assert self.others.wait(30), "they have no place to draw in"
        elif answer.done:
            self.left.discard(state[0])
            if not self.left:
                self.others.set()
        return answer


@pytest.fixture
def counted(monkeypatch):
    """Counts the places of a sampler that are taken and returned."""
    return functools.partial(_counted, monkeypatch)


def _counted(monkeypatch, sampler):
    programs, counts = sampler.programs, {"take": 0, "put": 0}
    take, put = programs.take, programs.put

    def count(name, place):
        counts[name] += int((place < programs.places).sum())
        return place

    monkeypatch.setattr(
        programs, "take", lambda *, place: take(place=count("take", place))
    )
    monkeypatch.setattr(
        programs, "put", lambda rows, *, place: put(rows, place=count("put", place))
    )
    return counts


# Two turns of three tokens at most, so that no episode ends by a limit before its tool.
LIMITS = episodes.Limits(tokens=ROOM, turn_tokens=6, turns=4)
OFTEN = tuple(range(1, 6))  # tokens that end a turn


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_others_draw_in_the_place_of_one_that_waits(model, monkeypatch, counted):
    options = {"places": 2, "limits": LIMITS, "stop_ids": OFTEN}
    script, params = Script(turns=3), params_of(model)
    monkeypatch.setattr(places, "PATIENCE", 1000.0)
    whole = draw(sampler_of(model, script, **options), params)
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    sampler = sampler_of(model, Slow(turns=3), **options)
    counts = counted(sampler)
    others = draw(sampler, params)
    chex.assert_trees_all_equal(whole, others)
    assert counts["take"] >= 2
    assert 1 <= counts["put"] <= counts["take"]  # what ends need not come back
    assert (whole.scores.parts["turns"] > 1).sum() >= 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MeshShape(data=2), MeshShape(data=2, tensor=2)])
def test_they_come_back_to_any_replica(shape, monkeypatch, counted):
    monkeypatch.setattr(places, "PATIENCE", 1000.0)
    model = dataclasses.replace(tiny.GPT2, vocab_multiple=4)
    mesh = shape.make(jax.devices()[: shape.size])
    params = sharding.place(params_of(model), mesh=mesh)
    options = {"places": 2, "limits": LIMITS, "stop_ids": OFTEN, "mesh": mesh}
    whole = draw(sampler_of(model, Script(turns=3), **options), params)
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    sampler = sampler_of(model, Slow(turns=3), **options)
    counts = counted(sampler)
    others = draw(sampler, params)
    chex.assert_trees_all_equal(whole, others)
    assert counts["put"] >= 1


@pytest.mark.slow
def test_nobody_leaves_a_place_that_nobody_needs(monkeypatch, counted):
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    late = Script(latency=lambda row, turn: 0.05)
    sampler = sampler_of(tiny.GPT2, late, places=ROWS)
    counts = counted(sampler)
    draw(sampler, params_of(tiny.GPT2))
    assert counts == {"take": 0, "put": 0}


@pytest.mark.slow
def test_nor_one_whose_answer_comes_at_once(monkeypatch, counted):
    monkeypatch.setattr(places, "PATIENCE", 1000.0)
    late = Script(latency=lambda row, turn: 0.02)
    sampler = sampler_of(tiny.GPT2, late, places=2)
    counts = counted(sampler)
    draw(sampler, params_of(tiny.GPT2))
    assert counts == {"take": 0, "put": 0}


@pytest.mark.slow
def test_the_clock_ends_episodes_without_a_place(monkeypatch, counted):
    """They keep their turns so far."""
    monkeypatch.setattr(places, "PATIENCE", 1000.0)
    model, params = tiny.GPT2, params_of(tiny.GPT2)
    options = {"places": 2, "stop_ids": OFTEN}
    whole = draw(sampler_of(model, Script(), limits=LIMITS, **options), params)
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    slow = Script()
    sampler = sampler_of(model, slow, limits=LIMITS._replace(seconds=3.0), **options)
    draw(sampler, params)  # compiles
    slow.latency = lambda row, turn: 5.0 if row in (0, 1) and turn == 1 else 0.0
    counts = counted(sampler)
    rollout, scores = draw(sampler, params)
    assert scores.parts["late"].tolist() == [1, 1, 0, 0, 0, 0]
    assert counts["take"] >= 2
    np.testing.assert_array_equal(rollout.tokens[2:], whole.rollout.tokens[2:])
    for row in (0, 1):
        mask = rollout.response_mask[row]
        assert mask.any()
        np.testing.assert_array_equal(
            rollout.tokens[row][mask], whole.rollout.tokens[row][mask]
        )
        np.testing.assert_array_equal(
            rollout.old_logprobs[row][mask], whole.rollout.old_logprobs[row][mask]
        )
