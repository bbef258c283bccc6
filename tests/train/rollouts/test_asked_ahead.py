"""An outside sampler with several processes: the first asks, without waiting."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from jax.experimental import multihost_utils

from rlhf_jax.algorithms.batch import Request
from rlhf_jax.devices import processes
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import StopError
from rlhf_jax.samplers import protocol
from rlhf_jax.train.rollouts.outside import OutsideSampler

MESH = MeshShape(data=2).make(jax.devices()[:2])


class Slow:
    """Draws once permitted: as many tokens as policies were handed over."""

    def __init__(self, failure=None, experts=None):
        self.may, self.failure, self.handed = threading.Event(), failure, []
        self.experts = experts

    def hand_over(self, params, *, version):
        self.handed.append((version, params["w"].tolist()))
        return 0.0

    def draw(self, prompts, *, key, version):
        assert self.may.wait(20)
        if self.failure is not None:
            raise self.failure
        rows = len(prompts.tokens)
        tokens = np.full((rows, 2), 5 + version, np.int32)
        return protocol.Drawn(
            tokens,
            np.zeros((rows, 2), np.float32),
            np.ones(rows, np.int32),
            experts=self.experts,
        )

    def close(self):
        self.may.set()


@pytest.fixture
def asked_by_two(monkeypatch):
    """Makes this process the first of two, both with its devices."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "owners", lambda where: {0, 1})
    monkeypatch.setattr(processes, "gathered", lambda value: [value, value])
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda tree, **_: tree)

    def ask(sampler, *, version):
        policy = {"w": jnp.full(3, float(version))}
        asked = sampler.draw_there(
            sampler.hand_over(policy),
            Request(toys.prompts(), jax.random.key(0), jnp.int32(version)),
        )
        policy["w"].delete()  # as the update that follows donates it
        return asked

    return ask


def of_two(sampler, **options):
    return OutsideSampler(sampler, home=MESH, max_new_tokens=2, **options)


def test_the_trainer_goes_on_while_the_sampler_draws(asked_by_two):
    slow = Slow()
    with of_two(slow) as sampler:
        asked = [asked_by_two(sampler, version=version) for version in (0, 0, 1)]
        assert not any(one.answer.done() for one in asked)
        slow.may.set()
        rollouts = [sampler.bring_home(one) for one in asked]
    assert slow.handed == [(0, [0.0] * 3), (1, [1.0] * 3)]
    for rollout, version in zip(rollouts, (0, 0, 1), strict=True):
        drawn = np.asarray(rollout.tokens)[np.asarray(rollout.response_mask)]
        assert drawn.tolist() == [5 + version] * 4
        assert np.asarray(rollout.version).max() == version


def test_what_the_sampler_raises_comes_home(asked_by_two):
    slow = Slow(StopError("it is gone"))
    slow.may.set()
    with of_two(slow) as sampler:
        asked = asked_by_two(sampler, version=0)
        with pytest.raises(StopError, match="it is gone"):
            sampler.bring_home(asked)


def test_leaving_does_not_wait_for_a_draw(asked_by_two):
    slow = Slow()
    with of_two(slow) as sampler:
        asked_by_two(sampler, version=0)
        waiting = asked_by_two(sampler, version=1)
    assert not waiting.answer.done()


@pytest.mark.parametrize("record", [None, (3, 1)])
def test_other_processes_pass_arrays_of_the_same_shapes(
    record, asked_by_two, monkeypatch
):
    """Prompts of four columns, responses of two, experts of three layers."""
    passed, experts = [], None
    if record is not None:
        experts = np.arange(4 * 6 * 3, dtype=np.int32).reshape(4, 6, *record)

    def broadcast(tree, **_):
        passed.extend([tree] if isinstance(tree, tuple) else [])
        return tree

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    slow = Slow(experts=experts)
    slow.may.set()
    with of_two(slow, record=record) as first, of_two(None, record=record) as other:
        rollout = first.bring_home(asked_by_two(first, version=0))
        monkeypatch.setattr(processes, "is_first", lambda: False)
        other.bring_home(asked_by_two(other, version=0))
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in passed]
    assert shapes[0] == shapes[1]
    if record is not None:
        np.testing.assert_array_equal(rollout.experts, experts)
