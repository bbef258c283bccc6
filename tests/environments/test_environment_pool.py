"""Environments in processes: their answers, and every failure."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_environment

import rlhf_jax
from rlhf_jax.data.json_lines import LocatedRow
from rlhf_jax.environments.answers import Answer, Begun
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.functional.checks import InputError, StopError

START = pickle.dumps(0)


@pytest.fixture(scope="module")
def pool():
    toy = toy_environment.Toy()
    with EnvironmentPool(toy, num_workers=2, timeout=60.0) as made:
        yield made


def test_states_go_from_turn_to_turn_as_bytes(pool):
    rows = [{"prompt": "a"}, {"prompt": [toy_environment.user("b")], "count": 6}]
    first, second = pool.reset(rows)
    assert first == Begun("a", first.state)
    assert second.prompt == rows[1]["prompt"]
    one = pool.step(first.state, "x").result()
    assert one == Answer("1 x", 0.25, False, one.state)
    two = pool.step(one.state, "y").result()
    assert (two.observation, two.reward) == ("2 y", 0.5)
    assert pool.step(second.state, "z").result().observation == "7 z"
    # The state of before is as good as it was.
    assert pool.step(one.state, "y").result() == two
    assert isinstance(two.state, bytes)


def test_a_field_of_a_message_may_be_null(pool):
    message = toy_environment.user("b")
    (begun,) = pool.reset([{"prompt": [{**message, "tool_calls": None}]}])
    assert begun.prompt == [message]
    why = "returned None as the prompt, expected a text"
    with pytest.raises(InputError, match=why):
        pool.reset([{"prompt": [{"role": "user", "content": None}]}])


def test_a_defect_reaches_the_one_who_waits(pool, monkeypatch):
    def defect(future, response, where):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(pool, "_answer", defect)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        pool.step(START, "x").result(timeout=60)


def test_what_is_done_needs_no_state(pool):
    assert pool.step(START, "done 2").result() == Answer("", 2.0, True, b"")


def test_answers_are_of_plain_types(pool):
    loud = pool.step(START, "loud").result()
    assert (type(loud.observation), type(loud.reward)) == (str, float)
    assert (loud.observation, loud.reward) == ("seen", 0.5)
    observation = pool.step(START, "messages").result().observation
    assert observation == [toy_environment.user("one"), toy_environment.user("two 1")]
    control = pool.step(START, "control").result()
    assert (control.observation, control.failure) == ("<|im_end|>\n<|im_start|>", None)


FAILURES = {
    "raise": "raised KeyError: 'gold'",
    "exit": "raised SystemExit: 3",
    "die": "ended its process (status 3)",
    "secretive": "raised Secretive, which cannot be shown",
    "nothing": "returned None, expected a Turn",
    "tuple": "returned a value of type tuple, expected a Turn",
    "reward nan": "returned nan, expected a finite number as the reward",
    "reward text": "returned '1', which is not a number, expected a finite number as",
    "reward large": "returned 1e+39, expected a finite number as the reward",
    "reward none": "returned None, which is not a number, expected a finite",
    "undecided": "returned a value of type int as `done`, expected True or False",
    "long": "returned 10000000 characters as the observation, expected at most 100000",
    "bytes": "returned a value of type bytes as the observation, expected a text or",
    "surrogate": r"returned '\udcff' at character 4 of the observation, which is no",
    "number": "returned a value of type int as the observation",
    "unpicklable": "returned a state that cannot be pickled: TypeError: not this one",
    "heavy": "returned 33554",
    "spoken": "returned a message of the assistant as the observation, expected those",
    "silent": "returned no message as the observation, expected those of others",
    "typed": "returned a value of type int as the observation, expected a text",
    "bare": "returned 'seen' as a message of the observation, expected {\"role\"",
    "many": "returned 60000 characters as the observation, expected at most 39992",
    "more": "returned 1000 messages as the observation, expected at most 100",
}


def test_what_is_counted_comes_in_the_order_of_the_names():
    with EnvironmentPool(toy_environment.Counts(), num_workers=1) as pool:
        assert pool.counts == ("calls", "errors")
        for response, counts in {
            '{"errors": 2, "calls": 3}': (3.0, 2.0),
            '{"errors": 1}': (0.0, 1.0),
            "{}": (0.0, 0.0),
        }.items():
            answer = pool.step(START, response).result()
            assert answer == Answer("", 1.0, True, b"", counts)
        for response, why in {
            '{"error": 1}': "returned counts of ['error'], expected some of ['calls', ",
            '{"errors": "1"}': "not a number, expected a finite number as the errors",
        }.items():
            answer = pool.step(START, response).result()
            assert (answer.reward, answer.counts) == (0.0, ())
            assert why in answer.failure.why
    taken = toy_environment.Counts()
    for name in ("late", "turns", "left_out"):
        taken.counts = ("calls", name)
        with pytest.raises(InputError, match=f"other than {name}, which every env"):
            EnvironmentPool(taken)


@pytest.mark.parametrize("response", FAILURES)
def test_a_failure_ends_its_episode_and_no_other(pool, response):
    futures = [pool.step(START, word) for word in ("a", response, "b")]
    before, failed, after = (future.result() for future in futures)
    assert failed.failure.why.startswith(FAILURES[response])
    assert failed.failure.where == f"response {response!r}"
    assert failed == Answer("", 0.0, True, b"", failure=failed.failure)
    assert (before.observation, after.observation) == ("1 a", "1 b")


def test_failures_of_a_batch_are_told_in_a_line(pool, capsys):
    pool.warn([], num_episodes=4)
    failure = pool.step(START, "raise", where="prompt 'Hi' (row 3)").result().failure
    pool.warn([failure, failure], num_episodes=4)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "warning: 2 of 4 episodes were ended by a failure of their environment, and"
        " are left out; the environment raised KeyError: 'gold' for prompt 'Hi' (row"
        " 3) and response 'raise'\n"
    )


def test_long_responses_are_cut_in_messages(pool):
    answer = pool.step(START, "raise " + "x" * 10**5).result()
    assert len(answer.failure.where) < 500


def test_a_response_may_hold_any_text(pool):
    text = "<|im_end|>\0é\u2028🙂"
    assert pool.step(START, text).result().observation == f"1 {text}"


def test_processes_do_not_load_jax(pool):
    assert pool.step(START, "loaded").result().observation == "False"


@pytest.mark.parametrize(
    ("reset", "why"),
    [
        ("raise", "raised KeyError: 'gold'"),
        ("die", r"ended its process \(status 3\)"),
        ("nothing", "returned None, expected a Started"),
        ("assistant", "returned a prompt that does not wait for the assistant"),
        ("empty", "returned a prompt that does not wait for the assistant"),
        ("bytes", "returned a value of type bytes as the prompt"),
    ],
)
def test_a_row_without_a_beginning_is_named(pool, reset, why):
    rows = [{}, LocatedRow({"reset": reset}, where="rows.jsonl:7")]
    with pytest.raises(
        InputError,
        match=rf"rows.jsonl:7: expected a row .* got {{'reset': '{reset}'}}, for which"
        rf" its reset {why}.*; correct the row",
    ):
        pool.reset(rows)
    assert pool.reset([{}])[0].prompt == "Go: "


def test_a_row_that_cannot_be_sent_stops_the_run(pool):
    with pytest.raises(StopError, match=r"processes of the environment do not work"):
        pool.reset([{"count": lambda: 1}])


@pytest.mark.slow
def test_what_hangs_is_ended_and_the_others_go_on():
    toy = toy_environment.Toy()
    with EnvironmentPool(toy, num_workers=2, timeout=1.0) as pool:
        responses = ("hang", "a", "spin", "b", "die", "c")
        answers = [
            future.result() for future in [pool.step(START, s) for s in responses]
        ]
        failures = [answer.failure for answer in answers]
        assert [bool(failure) for failure in failures] == [1, 0, 1, 0, 1, 0]
        assert [failures[i].timed_out for i in (0, 2, 4)] == [1, 1, 0]
        assert failures[0].why == "took longer than 1 s"
        assert failures[0].where == "response 'hang'"
        assert [answers[i].observation for i in (1, 3, 5)] == ["1 a", "1 b", "1 c"]
        with pytest.raises(InputError, match=r"row 0 .* its reset took longer than 1"):
            pool.reset([{"reset": "hang"}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "why"),
    [("raise", "raised KeyError"), ("hang", "took longer"), ("die", "ended its proc")],
)
def test_a_failure_may_stop_the_run(response, why):
    toy = toy_environment.Toy()
    options = {"num_workers": 1, "timeout": 1.0, "on_failure": "stop"}
    with EnvironmentPool(toy, **options) as pool:
        assert pool.step(START, "a").result().failure is None
        future = pool.step(START, response, where="prompt 'Hi'")
        with pytest.raises(
            StopError, match=f"{why}.* for prompt 'Hi' and response '{response}'; mend"
        ):
            future.result()


@pytest.mark.slow
def test_a_call_can_be_cancelled():
    with EnvironmentPool(toy_environment.Toy(), num_workers=1) as pool:
        futures = [pool.step(START, "hang") for _ in range(3)]
        assert [future.cancel() for future in futures] == [True] * 3
        assert pool.step(START, "a").result().observation == "1 a"


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_a_process_that_is_killed_between_calls_is_replaced(pause):
    with EnvironmentPool(toy_environment.Toy(), num_workers=1) as pool:
        pids = set()
        for _ in range(5):  # more than may end as they start
            pid = int(pool.step(START, "pid").result().observation)
            pids.add(pid)
            os.kill(pid, signal.SIGKILL)
            time.sleep(pause)  # before, or after it is known
        assert pool.step(START, "a").result().observation == "1 a"
        assert len(pids) == 5


LATE = """
from rlhf_jax.environments.protocol import Started, Turn
{body}

class Late:
    def reset(self, row):
        return Started("Go", 0)

    def step(self, state, response):
        return Turn("", 1.0, True, None)
"""


@pytest.mark.slow
def test_an_environment_that_cannot_be_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "late_environment.py"
    file.write_text(LATE.format(body=""))
    from late_environment import Late  # type: ignore

    file.write_text(LATE.format(body="raise ImportError('no such library')"))
    with EnvironmentPool(Late(), num_workers=1) as pool:
        why = r"environment could not be imported: ImportError: no such .* PYTHONPATH"
        with pytest.raises(StopError, match=why):
            pool.reset([{}])
        with pytest.raises(StopError, match=why):
            pool.step(START, "a").result()
    # A process that ends without a word would be replaced without end.
    file.write_text(LATE.format(body="import os; os._exit(0)"))
    with (
        EnvironmentPool(Late(), num_workers=1) as pool,
        pytest.raises(StopError, match=r"do not work: 3 in a row ended as they star"),
    ):
        pool.step(START, "a").result(timeout=60)


KILLED = """
import pickle, sys, toy_environment
from rlhf_jax.environments.pool import EnvironmentPool

with EnvironmentPool(toy_environment.Toy(), num_workers=1) as pool:
    pool.step(pickle.dumps(0), f"made {sys.argv[1]}").result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_and_clear_away_when_the_run_is_killed(tmp_path, by):
    made = tmp_path / "made"
    places = [Path(rlhf_jax.__file__).parents[1], Path(toy_environment.__file__).parent]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, made],
        env={"PYTHONPATH": ":".join(map(str, places)), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.DEVNULL,
    )
    until(made.exists)
    process.send_signal(by)
    process.wait()
    until(lambda: not made.exists())


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_pool_that_never_started_ends_at_once():
    with EnvironmentPool(toy_environment.Toy()):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers: expected a whole number, 1 or more, got 0"),
        ({"timeout": 0.0}, "timeout: expected a finite number above 0, got 0.0"),
        ({"max_observation": 0}, "max_observation: expected a finite number above 0"),
        (
            {"on_failure": "ignore"},
            "on_failure: expected one of 'leave_out', 'zero', 'stop', got",
        ),
    ],
)
def test_options_that_make_no_pool(options, message):
    with pytest.raises(InputError, match=message):
        EnvironmentPool(toy_environment.Toy(), **options)


class Local(toy_environment.Toy):
    """An environment that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("it has a lock")


def test_what_is_no_environment():
    with pytest.raises(InputError, match=r"methods reset and step, got 7; see"):
        EnvironmentPool(7)
    with pytest.raises(InputError, match=r"expected an instance .* got <class"):
        EnvironmentPool(toy_environment.Toy)
    with pytest.raises(InputError, match=r"expected an environment that other .* lock"):
        EnvironmentPool(Local())
