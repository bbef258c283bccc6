"""Episodes on a device, against full passes, one-turn samples and other orders."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import places
import pytest
import tiny
from toy_episodes import (
    PROMPT,
    ROOM,
    ROWS,
    STOP,
    Script,
    draw,
    drawn,
    params_of,
    prompt_columns_read,
    prompts,
    sampler_of,
    sharing,
)

from rlhf_jax import masked, rewards
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.environments import episodes
from rlhf_jax.functional.checks import StopError
from rlhf_jax.models.generation import decode
from rlhf_jax.roles import policy

MODELS = {
    "gpt2": tiny.GPT2,
    "llama": tiny.LLAMA,
    "mixed": tiny.MIXED,
    "parallel": tiny.PARALLEL,
}


# The grouped heads and the rotary positions of `LLAMA` are those of `MIXED` too.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name == "llama"))
        for name in MODELS
    ],
)
def model(request):
    return MODELS[request.param]


@pytest.mark.cases(quick=1)
def test_logprobs_are_those_of_whole_rows(model):
    params = params_of(model)
    rollout, scores = drawn(model, params, Script())
    full = jax.jit(policy.logprobs, static_argnames=("model",))(
        params, model=model, tokens=rollout.tokens, mask=rollout.mask
    )
    sampled = rollout.response_mask
    np.testing.assert_allclose(
        np.where(sampled, full, 0), rollout.old_logprobs, atol=1e-5
    )
    observed = np.asarray(rollout.mask & ~sampled)[:, PROMPT:]
    assert 0 < observed.sum() < sampled.sum()
    assert (rollout.tokens[:, PROMPT:][observed] == 9).all()
    assert (rollout.version == np.where(sampled, 3, 0)).all()
    assert (scores.parts["turns"] >= 1).all()
    np.testing.assert_allclose(
        scores.total, [n * (n + 1) / 8 for n in scores.parts["turns"]]
    )


@pytest.mark.cases(quick=1)
def test_rewards_stand_at_the_ends_of_turns(model):
    params = params_of(model)
    rollout, scores = drawn(model, params, Script())
    for row in range(ROWS):
        count = int(scores.parts["turns"][row])
        at = np.flatnonzero(scores.turns[row])
        np.testing.assert_allclose(scores.turns[row][at], np.arange(1, count) / 4)
        assert rollout.response_mask[row][at].all()
        stops = np.flatnonzero(
            (rollout.tokens[row] == STOP) & rollout.response_mask[row]
        )
        assert set(at) <= set(stops)


@pytest.mark.slow
def test_bits_do_not_depend_on_latency_places_or_order(model):
    params = params_of(model)
    whole = drawn(model, params, Script())
    late = Script(latency=lambda row, turn: 0.01 * ((row * 7 + turn * 3) % 5))
    for other in (
        drawn(model, params, late),
        drawn(model, params, Script(latency=lambda row, turn: 0.02 * (row == 0))),
    ):
        chex.assert_trees_all_equal(whole, other)
    # Fewer places are other products, which round otherwise.
    few = drawn(model, params, late, places=4)
    np.testing.assert_array_equal(whole.rollout.tokens, few.rollout.tokens)
    np.testing.assert_allclose(
        whole.rollout.old_logprobs, few.rollout.old_logprobs, atol=1e-5
    )


@pytest.mark.slow
def test_bits_do_not_depend_on_latency_with_optimised_kernels():
    flags = ("XLA_FLAGS", "JAX_PLATFORMS")
    process = subprocess.run(
        [sys.executable, places.PROGRAMS / "late_answers.py"],
        env={name: value for name, value in os.environ.items() if name not in flags}
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(
                (places.PYTHONPATH, str(places.TESTS / "environments"))
            ),
        },
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout == "0 numbers differ\n"


@pytest.mark.slow
@pytest.mark.cases(quick=1)
def test_one_turn_is_what_a_sampler_draws(model):
    params = params_of(model)
    limits = episodes.Limits(tokens=ROOM, turn_tokens=ROOM, turns=1)
    rollout, scores = drawn(model, params, Script(turns=1), limits=limits)
    batch = prompts()
    key, _ = jax.random.split(jax.random.key(7))
    generated = decode.generate(
        params,
        model=model,
        tokens=jnp.asarray(batch.tokens),
        mask=jnp.asarray(batch.mask),
        keys=decode.row_keys(key, index=batch.index, sample=batch.sample),
        max_new_tokens=ROOM,
        stop_ids=(STOP,),
    )
    np.testing.assert_array_equal(rollout.tokens, generated.tokens)
    np.testing.assert_array_equal(rollout.response_mask, generated.response_mask)
    np.testing.assert_allclose(rollout.old_logprobs, generated.logprobs, atol=1e-5)
    np.testing.assert_allclose(rollout.entropy, generated.entropy, atol=1e-5)
    assert not scores.turns.any()


def assert_ends(rollout, scores, *, turns, limit, stop_ids=(STOP,)):
    """Asserts the end of each scripted episode from its tokens and turns."""
    expected = {name: [] for name in ("truncated", "out_of_turns", "out_of_room")}
    numbers = np.asarray(scores.turn_ends).sum(axis=1)
    for row, number in enumerate(numbers):
        mask = rollout.response_mask[row]
        stopped = rollout.tokens[row][mask][-1] in stop_ids
        done = number == 1 + row % turns  # as `Script` has it
        out_of_turns = stopped and not done and number >= limit
        expected["truncated"].append(not stopped)
        expected["out_of_turns"].append(out_of_turns)
        expected["out_of_room"].append(stopped and not done and not out_of_turns)
    means = masked.mean_stats(rewards.part_stats(scores))
    for name, ended in expected.items():
        np.testing.assert_array_equal(scores.parts[name], ended, err_msg=name)
        share = float(means[f"reward/{name}"])
        assert share == pytest.approx(np.mean(ended))
    assert float(means["reward/turns"]) == pytest.approx(numbers.mean())


def test_what_ends_an_episode_is_counted():
    model = tiny.GPT2
    params = params_of(model)
    endless = Script(turns=99)
    limits = episodes.Limits(tokens=10, turn_tokens=3, turns=2)
    rollout, scores = drawn(model, params, endless, limits=limits)
    parts = {name: part for name, part in scores.parts.items() if name != "turns"}
    ended = np.array(list(parts.values()))
    assert ((ended.sum(axis=0) == 1) | (np.arange(ROWS) == 0)).all()
    assert parts["truncated"].sum() >= 1
    assert_ends(rollout, scores, turns=99, limit=2)
    assert (rollout.response_mask.sum(axis=1) <= 10).all()
    failing = Script(fails={(2, 1)})
    _, scores = drawn(model, params, failing)
    assert scores.parts["failed"].tolist() == [0, 0, 1, 0, 0, 0]
    assert scores.total[2] == 0
    assert failing.warned == [(1, ROWS)]


def test_what_an_environment_counts_adds_up_over_the_turns():
    script = Script(counts=("ones", "tens"), fails={(2, 2)})
    _, scores = drawn(tiny.GPT2, params_of(tiny.GPT2), script)
    turns = scores.parts["turns"] - scores.parts["failed"]
    assert turns.max() > 1
    assert scores.parts["failed"].sum() == 1
    np.testing.assert_array_equal(scores.parts["ones"], turns * (turns + 1) / 2)
    np.testing.assert_array_equal(scores.parts["tens"], 10 * scores.parts["ones"])


@pytest.mark.parametrize("on_failure", ["leave_out", "zero"])
def test_an_observation_that_cannot_be_encoded_ends_its_episode_alone(on_failure):
    params = params_of(tiny.GPT2)
    script = Script(on_failure=on_failure)
    whole = drawn(tiny.GPT2, params, Script())
    rollout, scores = drawn(tiny.GPT2, params, script, rejects="99")
    failed = np.array(scores.parts["failed"]) > 0
    assert 0 < failed.sum() < ROWS
    assert scores.left_out.tolist() == (failed & (on_failure == "leave_out")).tolist()
    # One turn more than was good, of which the reward is 0.
    turns = scores.parts["turns"]
    np.testing.assert_allclose(
        scores.total,
        [(n - bad) * (n - bad + 1) / 8 for n, bad in zip(turns, failed, strict=True)],
    )
    assert (scores.total[failed] < whole.scores.total[failed]).all()
    np.testing.assert_array_equal(
        rollout.tokens[~failed], whole.rollout.tokens[~failed]
    )
    assert script.warned == [(failed.sum(), ROWS)]


def test_an_observation_that_cannot_be_encoded_may_stop_the_run():
    why = (
        "returned an observation that cannot be encoded: InputError: an observation of"
    )
    with pytest.raises(StopError, match=why):
        drawn(tiny.GPT2, params_of(tiny.GPT2), Script(on_failure="stop"), rejects="99")


@pytest.mark.slow
def test_a_slow_answer_ends_its_episode_alone():
    model = tiny.GPT2
    params = params_of(model)
    pool = Script()
    limits = episodes.Limits(tokens=ROOM, turn_tokens=6, turns=4, seconds=1.5)
    sampler = sampler_of(model, pool, limits=limits)
    draw(sampler, params)  # compiles, which may be late
    whole = drawn(model, params, Script())
    pool.latency = lambda row, turn: 2.0 * (row == 1 and turn == 1)
    rollout, scores = draw(sampler, params)
    assert scores.parts["late"].tolist() == [0, 1, 0, 0, 0, 0]
    others = np.arange(ROWS) != 1
    jax.tree.map(
        lambda old, new: np.testing.assert_array_equal(old[others], new[others]),
        (whole.rollout, whole.scores.total, whole.scores.turns),
        (rollout, scores.total, scores.turns),
    )
    mask = rollout.response_mask[1]
    assert 0 < mask.sum() <= whole.rollout.response_mask[1].sum()
    assert (rollout.tokens[1][mask] == whole.rollout.tokens[1][mask]).all()


@pytest.mark.slow
def test_a_prompt_that_rows_share_is_read_once_to_the_same_bits(model, monkeypatch):
    """Rows 0 to 3 have one prompt; run separately, each reads all of it."""
    params = params_of(model)
    shared = sharing([0, 0, 0, 0, 4, 5], sample=[0, 1, 2, 3, 0, 0])

    def play(*, places=ROWS):
        sampler = sampler_of(model, Script(), places=places)
        with prompt_columns_read(sampler.programs) as counts:
            output = sampler(params, Request(shared, jax.random.key(7)))
        return output, sum(counts)

    (output, count), (few, count_of_few) = play(), play(places=4)
    sizes = shared.mask.sum(axis=1)
    # The first reads all, and of the other three each what follows a chunk of three.
    assert count == sizes[0] + 3 * 2 + sizes[4] + sizes[5]
    np.testing.assert_array_equal(few.rollout.tokens, output.rollout.tokens)
    assert count_of_few == count
    find = episodes.Play._begin

    def begin_alone(self, row):
        find(self, row)
        self._live[-1].first = None

    monkeypatch.setattr(episodes.Play, "_begin", begin_alone)
    alone, count = play()
    assert count == sizes.sum()
    chex.assert_trees_all_equal(output, alone)
    assert len({tuple(row) for row in output.rollout.tokens[:4].tolist()}) == 4


@pytest.mark.slow
def test_an_episode_that_nothing_moves_on_raises(monkeypatch):
    """Row 1 waits for a copy of row 0's prompt that never comes: no endless loop."""
    monkeypatch.setattr(episodes.Play, "_copy", lambda self: None)
    shared = sharing([0, 0], sample=[0, 1])
    sampler = sampler_of(tiny.GPT2, Script(), places=2, chunk=2)
    with pytest.raises(
        RuntimeError, match=r"draw or to wait .* got rows \[1\] that do"
    ):
        sampler(params_of(tiny.GPT2), Request(shared, jax.random.key(7)))


OFTEN = {"stop_ids": tuple(range(1, 11))}  # nearly every token ends a turn


@pytest.mark.slow
def test_the_room_of_an_episode_ends_it():
    model = tiny.GPT2
    limits = episodes.Limits(tokens=10, turn_tokens=3, turns=99)
    rollout, scores = drawn(
        model, params_of(model), Script(turns=99), limits=limits, **OFTEN
    )
    by_room = scores.parts["out_of_room"] > 0
    assert by_room.any()
    assert_ends(rollout, scores, turns=99, limit=99, stop_ids=OFTEN["stop_ids"])
    used = rollout.mask[:, PROMPT:].sum(axis=1)
    assert used.max() <= 10
    # What did not fit is not there: the row ends with its last turn.
    last = rollout.response_mask.shape[1] - 1 - rollout.response_mask[:, ::-1].argmax(1)
    assert (last[by_room] == PROMPT + used[by_room] - 1).all()


@pytest.mark.slow
def test_the_number_of_turns_ends_an_episode():
    model = tiny.GPT2
    limits = episodes.Limits(tokens=ROOM, turn_tokens=3, turns=2)
    rollout, scores = drawn(
        model, params_of(model), Script(turns=99), limits=limits, **OFTEN
    )
    assert scores.parts["turns"].max() == 2
    assert_ends(rollout, scores, turns=99, limit=2, stop_ids=OFTEN["stop_ids"])
    assert (scores.parts["out_of_turns"] > 0).any()


@pytest.mark.slow
def test_episodes_that_had_no_time_to_begin_are_counted():
    model = tiny.GPT2
    pool = Script(latency=lambda row, turn: 1.0)
    limits = episodes.Limits(tokens=ROOM, turn_tokens=3, turns=2, seconds=0.01)
    rollout, scores = drawn(model, params_of(model), pool, limits=limits, places=2)
    assert scores.parts["late"].tolist() == [1] * ROWS
    begun = rollout.response_mask.any(axis=1)
    assert not begun[2:].any()
    assert not scores.total.any()
