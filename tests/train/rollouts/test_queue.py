"""The queue of rollouts: policy versions, errors, waits and snapshots."""

import threading
import time
from concurrent.futures import Future

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.algorithms.batch import Request
from rlhf_jax.functional.checks import StopError
from rlhf_jax.runs.stage import is_settled, settled
from rlhf_jax.train.rollouts.queue import RolloutQueue

NUM_STEPS = 7


@flax.struct.dataclass
class Toy:
    """Stands in for a rollout: the prompt and policy of a draw, and the version."""

    prompt: jax.Array
    policy: jax.Array
    version: jax.Array

    @property
    def parts(self):
        return [float(self.prompt), float(self.policy), int(self.version)]


def request(step, version):
    version = jnp.array(version, copy=True)  # the update donates it
    return Request(step, jax.random.key(step), version)


def drawn(policy, asked):
    toy = Toy(jnp.float32(asked.prompts), policy=policy, version=asked.version)
    return toy, dict


def queue_of(staleness, *, draw=drawn, threaded=True, patience=20.0, **others):
    return RolloutQueue(
        draw,
        hand_over=lambda policy: jnp.array(policy, copy=True),
        request=request,
        staleness=staleness,
        threaded=threaded,
        patience=patience,
        **{"num_steps": NUM_STEPS} | others,
    )


@pytest.fixture(scope="module")
def update():
    return jax.jit(lambda policy, version: (policy + 10, version + 1), donate_argnums=0)


def played(queue, update, *, start=0, state=None, stop=NUM_STEPS):
    """(each step's rollout, the final state)."""
    policy, version = jnp.float32(10 * start), jnp.int32(start)
    state = queue.first(policy, version=version) if state is None else dict(state)
    learned = []
    with queue:
        state |= queue.begin(state, start=start, policy=policy, version=version)
        for step in range(start, stop):
            rollout, scores = queue.take()
            assert scores == {}
            learned.append(rollout.parts)
            state |= queue.submit(step + queue.staleness, policy, version=version)
            policy, version = update(policy, version)  # which donates what it reads
        return learned, settled(state)


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("staleness", [1, 3, NUM_STEPS + 2])
def test_each_step_learns_from_its_rollout_by_a_policy_k_steps_older(
    update, staleness, threaded
):
    learned, state = played(queue_of(staleness, threaded=threaded), update)
    versions = [max(0, step - staleness) for step in range(NUM_STEPS)]
    assert learned == [
        [step, 10 * version, version] for step, version in enumerate(versions)
    ]
    assert len(state) == staleness


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_what_a_snapshot_has_goes_on_as_if_nothing_had_been(update, stop):
    whole, _ = played(queue_of(3), update)
    before, state = played(queue_of(3), update, stop=stop)
    after, _ = played(queue_of(3), update, start=stop, state=state)
    assert before + after == whole
    names = ["rollout_0", "rollout_1", "rollout_2"]
    assert sorted(state) == names
    prompts_in_state = [float(state[name][0].prompt) for name in names]
    assert prompts_in_state == [min(stop + i, NUM_STEPS - 1) for i in range(3)]


def test_without_a_thread_what_is_drawn_arrives_when_it_is_taken(update):
    """Rollouts arrive in the order of the steps, and once, also after a snapshot."""
    arrived = []

    def arrive(there):
        rollout, _ = there
        arrived.append(int(rollout.prompt))
        return rollout, dict

    late = {"threaded": False, "arrive": arrive}
    whole, _ = played(queue_of(3), update)
    learned, _ = played(queue_of(3, **late), update)
    assert learned == whole
    assert arrived == list(range(NUM_STEPS))
    arrived.clear()
    queue, policy = queue_of(3, **late), jnp.float32(0)
    state = queue.first(policy, version=jnp.int32(0))
    state |= queue.begin(state, start=0, policy=policy, version=jnp.int32(0))
    assert arrived == [0]
    for _ in range(2):
        assert [x.parts[0] for x, _ in settled(state).values()] == [0, 1, 2]
    assert arrived == [0, 1, 2]


def test_a_run_that_is_made_longer_draws_what_its_snapshot_has_not(update):
    before, state = played(queue_of(3, num_steps=5), update, stop=4)
    assert [float(state[name][0].prompt) for name in sorted(state)] == [4, 4, 4]
    after, _ = played(queue_of(3), update, start=4, state=state)
    learned = before + after
    assert [prompt for prompt, *_ in learned] == list(range(NUM_STEPS))
    ages = [step - version for step, (_, _, version) in enumerate(learned)]
    # The policies of the steps before are gone, so a newer one draws.
    assert ages == [0, 1, 2, 3, 3, 1, 2]


def test_what_a_draw_raises_reaches_the_trainer_with_its_message(update):
    def failing(policy, asked):
        if asked.prompts == 4:
            raise StopError("the verifier of step 4 is gone")
        return drawn(policy, asked)

    before = threading.active_count()
    with pytest.raises(StopError, match=r"^the verifier of step 4 is gone$"):
        played(queue_of(2, draw=failing), update)
    assert threading.active_count() == before


def test_a_draw_that_hangs_keeps_neither_the_trainer_nor_a_snapshot(update):
    released = threading.Event()

    def hanging(policy, asked):
        if asked.prompts > 1:
            released.wait(20)
        return drawn(policy, asked)

    start, queue = time.monotonic(), queue_of(2, draw=hanging, patience=0.1)
    policy, version = jnp.float32(0), jnp.int32(0)
    state = queue.first(policy, version=version)
    with queue:
        state |= queue.begin(state, start=0, policy=policy, version=version)
        queue.take()
        state |= queue.submit(2, policy, version=version)
        assert not is_settled(state)
    assert time.monotonic() - start < 10
    released.set()


def test_a_second_ctrl_c_waits_for_no_draw(update):
    released = threading.Event()

    def hanging(policy, asked):
        if asked.prompts:
            released.wait(20)
        return drawn(policy, asked)

    policy, version = jnp.float32(0), jnp.int32(0)
    queue = queue_of(2, draw=hanging)
    state = queue.first(policy, version=version)
    start = time.monotonic()

    def interrupted():
        with queue:
            queue.begin(state, start=0, policy=policy, version=version)
            time.sleep(0.1)  # for the draw to begin
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - start < 10
    released.set()


def test_both_waits_are_counted_also_while_they_last(update):
    def slow(policy, asked):
        time.sleep(0.1 if asked.prompts else 0)
        return drawn(policy, asked)

    policy, version, queue = jnp.float32(0), jnp.int32(0), queue_of(1, draw=slow)
    state = queue.first(policy, version=version)
    with queue:
        queue.begin(state, start=0, policy=policy, version=version)
        queue.take()
        queue.submit(1, policy, version=version)
        queue.take()
        waits = queue.waits.read()
        assert 0.05 < waits["trainer"] < 1
        time.sleep(0.2)
        idle = queue.waits.read()  # it waits on
        assert idle["trainer"] == 0
        assert 0.1 < idle["sampler"] < 1
        assert queue.waits.read()["sampler"] < 0.1


def test_a_snapshot_waits_as_the_trainer_and_the_end_is_no_wait(update):
    def slow(policy, asked):
        time.sleep(0.2 if asked.prompts else 0)
        return drawn(policy, asked)

    policy, version = jnp.float32(0), jnp.int32(0)
    queue = queue_of(1, draw=slow, num_steps=2)
    state = queue.first(policy, version=version)
    with queue:
        state = queue.begin(state, start=0, policy=policy, version=version)
        queue.take()
        state = queue.submit(1, policy, version=version)
        queue.waits.read()
        settled(state)
        assert 0.1 < queue.waits.read()["trainer"] < 1
        queue.take()
        queue.submit(2, policy, version=version)  # of which there is none
        queue.waits.read()
        time.sleep(0.2)
        assert queue.waits.read()["sampler"] == 0


@pytest.mark.slow
def test_the_next_draw_begins_while_scores_are_waited_for():
    """Two scores and draws of 0.3 s each take 0.9 s in all, not 1.2 s."""

    def scored(policy, asked):
        time.sleep(0.3 if asked.prompts else 0)
        rollout, _ = drawn(policy, asked)

        def scores():
            time.sleep(0.3 if asked.prompts else 0)
            if asked.prompts == 3:
                raise StopError("no scores of step 3")
            return rollout.prompt

        return rollout, scores

    policy, version, queue = jnp.float32(0), jnp.int32(0), queue_of(3, draw=scored)
    state = queue.first(policy, version=version)
    with queue:
        start = time.perf_counter()
        queue.begin(state, start=0, policy=policy, version=version)
        taken = [queue.take()]
        queue.submit(3, policy, version=version)
        taken += [queue.take(), queue.take()]
        assert 0.85 < time.perf_counter() - start < 1.15
        assert [int(scores) for _, scores in taken] == [0, 1, 2]
        with pytest.raises(StopError, match="no scores of step 3"):
            queue.take()


def test_a_state_that_failed_is_not_settled():
    future: Future[object] = Future()
    future.set_exception(StopError("gone"))
    assert not is_settled({"rollout": future})
    with pytest.raises(StopError, match="gone"):
        settled({"rollout": future})
