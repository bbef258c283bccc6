"""Environments with `async def step`: many concurrent calls in one process."""

import os
import pickle
import time

import pytest
import toy_async_environment
from toy_async_environment import Slow

from rlhf_jax.environments import demonstrations
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.verification import worker

START = pickle.dumps(0)


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(Slow(), num_workers=1, timeout=60.0) as made:
        yield made


def answers_to(pool, *responses):
    futures = [pool.step(START, response) for response in responses]
    return [future.result() for future in futures]


def test_calls_wait_beside_each_other(pool):
    """Each of 40 calls returns once all 40 have begun."""
    (begun,) = pool.reset([{"prompt": "a"}])
    assert (begun.prompt, pickle.loads(begun.state)) == ("a", 0)
    answers = answers_to(pool, *["meet 40"] * 40)
    assert [answer.failure for answer in answers] == [None] * 40
    assert len({answer.observation for answer in answers}) == 1  # a process
    assert {pickle.loads(answer.state) for answer in answers} == {1}


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("raise", "raised KeyError: 'gold'"),
        ("cancel", "raised CancelledError: "),
        ("late", "raised TimeoutError: of a server"),
    ],
)
def test_a_failure_ends_its_call_alone(pool, response, why):
    one, failed, other = answers_to(pool, "nap", response, "nap")
    assert (failed.failure.why, failed.failure.timed_out) == (why, False)
    assert one == other
    assert one.failure is None


@pytest.mark.slow
def test_a_call_that_hangs_is_ended_and_its_process_goes_on():
    with EnvironmentPool(Slow(), num_workers=1, timeout=0.5) as pool:
        one, hangs, other = answers_to(pool, "nap", "hang", "nap")
        (after,) = answers_to(pool, "a")
    failure = hangs.failure
    assert (failure.why, failure.timed_out) == ("took longer than 0.5 s", True)
    assert one.observation == other.observation == after.observation


@pytest.mark.slow
def test_calls_of_a_process_that_ends_are_asked_again():
    """Each is then called alone, which shows the call that ended the process."""
    with EnvironmentPool(Slow(), num_workers=1, timeout=60.0) as pool:
        answers = answers_to(pool, "nap", "die", "nap", "die", "nap")
    assert [answer.failure and answer.failure.why for answer in answers] == [
        *(None, "ended its process (status 3)", None),
        *("ended its process (status 3)", None),
    ]


@pytest.mark.slow
def test_a_call_that_blocks_its_process_is_ended(monkeypatch):
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.5)
    with EnvironmentPool(Slow(), num_workers=1, timeout=1.0) as pool:
        blocks, other = pool.step(START, "block"), pool.step(START, "nap")
        assert blocks.result().failure.why == "took longer than 1 s"
        assert blocks.result().failure.timed_out
        assert other.result().failure is None


def test_calls_that_are_under_way_at_the_end_clear_away(tmp_path):
    made = tmp_path / "made", tmp_path / "too"
    with EnvironmentPool(Slow(), num_workers=1) as pool:
        cancelled, _ = [pool.step(START, f"made {path}") for path in made]
        until(lambda: all(path.exists() for path in made))
        cancelled.cancel()
        until(lambda: not made[0].exists())
        assert made[1].exists()
    until(lambda: not made[1].exists())


def test_what_returns_a_coroutine_is_waited_for():
    with EnvironmentPool(toy_async_environment.Wrapped(), num_workers=1) as pool:
        assert pool.reset([{"prompt": "a"}])[0].prompt == "a"
        assert [answer.reward for answer in answers_to(pool, "nap", "a")] == [0.5, 0.5]


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_expert_plays_them():
    class Two(Slow):
        async def step(self, state, response):
            turn = await super().step(state, response)
            return turn._replace(done=state == 1)

    played = demonstrations.play(Two(), {"prompt": "a"}, expert=lambda row, turns: "b")
    assert played == ("a", ["b", str(os.getpid()), "b"], 1.0)
