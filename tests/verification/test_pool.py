import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_verifier

import rlhf_jax
from rlhf_jax import masked, rewards, verifiers
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.rewards.text import Texts
from rlhf_jax.verification.code.verifier import PythonTests
from rlhf_jax.verification.pool import VerifierPool


def texts(*responses, row=None):
    return Texts(
        prompts=[f"prompt {i}" for i in range(len(responses))],
        responses=list(responses),
        rows=[{} if row is None else row] * len(responses),
        index=np.arange(len(responses)) + 10,
    )


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(toy_verifier.check, num_workers=2, timeout=60.0) as made:
        yield made


def test_each_response_has_its_own_score(pool, capsys):
    expected = np.random.default_rng(0).normal(size=20).astype(np.float32)
    scores = pool.submit(texts(*map(str, expected))).collect()
    np.testing.assert_array_equal(scores.total, expected)
    assert scores.total.dtype == np.float32
    assert not scores.parts["failed"].any()
    assert not scores.parts["timed_out"].any()
    assert capsys.readouterr().err == ""


def test_the_largest_float32_is_a_score(pool):
    largest = float(np.finfo(np.float32).max)
    scores = pool.submit(texts(repr(largest), repr(-largest))).collect()
    np.testing.assert_array_equal(scores.total, np.float32([largest, -largest]))
    assert not scores.parts["failed"].any()


def test_no_responses_have_every_part_of_scores():
    """A process whose devices have no rows puts its share of what others computed."""
    verifier = PythonTests(extract="whole", seconds=2.0, unsafe=True)
    with VerifierPool(verifier, num_workers=1, on_failure="leave_out") as pool:
        scores = pool.submit(texts()).collect()
    names = {"failed", "timed_out", "refused", "code_timed_out", "suspicious"}
    assert scores.parts.keys() == names
    arrays = [scores.total, *scores.parts.values()]
    assert {(array.dtype, array.shape) for array in arrays} == {
        (np.dtype(np.float32), (0,))
    }
    assert (scores.left_out.dtype, scores.left_out.shape) == (np.dtype(bool), (0,))


FAILURES = [
    ("raise", "raised KeyError: 'gold'"),
    ("exit", "raised SystemExit: 3"),
    ("nan", "returned nan"),
    ("inf", "returned inf"),
    ("text", "returned 'good', which is not a number"),
    ("nothing", "returned None, which is not a number"),
    ("several", "raised TypeError: only 0-dimensional arrays can be converted to Pyt"),
    ("huge", "raised OverflowError: int too large to convert to float"),
    ("large", "returned 1e+39"),
    ("3.5e38", "returned 3.5e+38"),
    ("-3.5e38", "returned -3.5e+38"),
    ("secretive", "raised Secretive, which cannot be shown"),
]


@pytest.mark.parametrize(("response", "why"), FAILURES, ids=dict(FAILURES))
def test_a_failure_is_left_out_counted_and_told_once(pool, capsys, response, why):
    scores = pool.submit(texts("2", response, response, "3")).collect()
    np.testing.assert_array_equal(scores.total, [2.0, 0.0, 0.0, 3.0])
    np.testing.assert_array_equal(scores.left_out, [False, True, True, False])
    np.testing.assert_array_equal(scores.parts["failed"], [0.0, 1.0, 1.0, 0.0])
    means = masked.mean_stats(rewards.part_stats(scores))
    assert float(means["reward/failed"]) == 0.5
    assert float(means["reward/timed_out"]) == 0.0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"warning: 2 of 4 responses could not be verified and are left out; the "
        f"verifier "
        f"{why}"
    )
    assert line.endswith(
        f" for prompt 'prompt 1' (row 11 of the data) and response {response!r}"
    )


def test_a_failure_may_score_0_instead():
    with VerifierPool(toy_verifier.check, num_workers=1, on_failure="zero") as pool:
        scores = pool.submit(texts("2", "raise")).collect()
    np.testing.assert_array_equal(scores.total, [2.0, 0.0])
    assert scores.left_out is None


def test_the_caller_goes_on_while_processes_verify(pool, tmp_path):
    """They wait for a file that the caller makes after it has run a program."""
    row = {"until": str(tmp_path / "file")}
    pending = pool.submit(texts("wait", "wait", "wait", row=row))
    product = jax.jit(jnp.dot)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert float(product[0, 0]) == 64.0
    assert not pending.done()
    Path(row["until"]).touch()
    np.testing.assert_array_equal(pending.collect().total, [1.0, 1.0, 1.0])
    assert pending.done()


def test_processes_do_not_load_jax(pool):
    np.testing.assert_array_equal(pool.submit(texts("loaded")).collect().total, [0.0])


def test_a_row_that_cannot_be_sent_stops_the_run(pool):
    with pytest.raises(StopError, match=r"that verify do not work: .*<lambda>"):
        pool.submit(texts("row", row={"score": lambda: 1}))
    # The pool is as good as before.
    scores = pool.submit(texts("row", row={"score": np.float32(0.25)})).collect()
    np.testing.assert_array_equal(scores.total, [0.25])


class Answers:
    """Responses to two prompts of one token, which are rows 1 and 0."""

    tokens = np.array([[7, 1, 2], [8, 3, 0]], np.int32)
    mask = np.array([[1, 1, 1], [1, 1, 0]], bool)
    response_mask = np.array([[0, 1, 1], [0, 1, 0]], bool)
    index = np.array([1, 0], np.int32)


def decode(ids):
    return "".join(map(str, ids))


@pytest.mark.slow
def test_a_verifier_as_a_reward_among_others():
    rows = [{"answer": "3"}, {"answer": "11"}]
    with VerifierPool(verifiers.LastInteger(), num_workers=1) as pool:
        reward = pool.reward(decode=decode, rows=rows)
        np.testing.assert_array_equal(reward(Answers()).total, [0.0, 1.0])
        # The same processes verify the answers to other rows.
        other = pool.reward(decode=decode, rows=[{"answer": "4"}, {"answer": "12"}])
        both = rewards.weighted({"here": (1.0, reward), "there": (0.5, other)})
        scores = both(Answers())
    np.testing.assert_array_equal(scores.total, [0.5, 1.0])
    assert list(scores.parts) == [
        *("here", "here/failed", "here/timed_out", "here/left_out"),
        *("there", "there/failed", "there/timed_out", "there/left_out"),
    ]


@pytest.mark.slow
def test_what_hangs_or_dies_is_ended_and_the_others_go_on(capsys):
    """Hanging in Python or asleep, or a process that ends silently."""
    with VerifierPool(toy_verifier.check, num_workers=2, timeout=1.0) as pool:
        scores = pool.submit(texts("hang", "1", "spin", "2", "die", "3")).collect()
        np.testing.assert_array_equal(scores.total, [0.0, 1.0, 0.0, 2.0, 0.0, 3.0])
        np.testing.assert_array_equal(scores.parts["failed"], [1, 0, 1, 0, 1, 0])
        np.testing.assert_array_equal(scores.parts["timed_out"], [1, 0, 1, 0, 0, 0])
        late, ended = capsys.readouterr().err.splitlines()  # one line per kind
        assert "2 of 6 responses" in late
        assert "the verifier took longer than 1 s for prompt 'prompt 0' (row 10" in late
        assert "1 of 6 responses" in ended
        assert "ended its process (status 3) for prompt 'prompt 4' (row 14" in ended
        scores = pool.submit(texts("die", "die quietly", "4")).collect()
        np.testing.assert_array_equal(scores.total, [0.0, 0.0, 4.0])
        assert not scores.parts["timed_out"].any()
        assert "ended its process (status 3)" in capsys.readouterr().err
        pool.submit(texts("die quietly")).collect()
        assert "ended its process (status 0)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("raise", "raised KeyError: 'gold'"),
        ("nan", "returned nan, expected a finite number as the score"),
        ("hang", "took longer than 1 s"),
        ("die", r"ended its process \(status 3\)"),
    ],
)
def test_a_failure_may_stop_the_run(response, why):
    with (
        pytest.raises(
            StopError,
            match=rf"the verifier {why} for prompt 'prompt 1' \(row 11 of the data\) "
            rf"and response '{response}'; mend it, or let",
        ),
        VerifierPool(
            toy_verifier.check, num_workers=2, timeout=1.0, on_failure="stop"
        ) as pool,
    ):
        pool.submit(texts("1", response, *["hang"] * 20)).collect()


SCRIPT = """
print("imported", flush=True)
import numpy as np, toy_verifier
from rlhf_jax.verification import pool
from rlhf_jax.roles.rewards.text import Texts
from rlhf_jax.functional.checks import InputError

def ours(prompt, response, row):
    return 1.0

try:
    pool.VerifierPool(ours)
except InputError as error:
    print(error)
with pool.VerifierPool(toy_verifier.check, num_workers=2) as running:
    print(running.submit(Texts(["p"], ["1"], [{}], np.zeros(1))).collect().total)
"""


@pytest.mark.slow
def test_processes_do_not_import_the_script_that_was_started(tmp_path):
    """It needs no `if __name__ == "__main__"`, and may not define the verifier."""
    (tmp_path / "script.py").write_text(SCRIPT)
    places = [Path(rlhf_jax.__file__).parents[1], Path(toy_verifier.__file__).parent]
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(map(str, places)), "JAX_PLATFORMS": "cpu"},
    )
    first, refusal, total = done.stdout.splitlines()
    assert (first, total) == ("imported", "[1.]")
    assert "ours" in refusal
    assert "of the script that was started; move it to a module" in refusal
    assert done.stderr == ""


LATE = """
import time
{body}

def check(prompt, response, row):
    return float(response)
"""


@pytest.mark.slow
def test_importing_the_verifier_is_not_in_its_time(tmp_path, monkeypatch):
    """A module that cannot be imported is not counted against a response."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "late_verifier.py"
    file.write_text(LATE.format(body=""))
    check = importlib.import_module("late_verifier").check
    file.write_text(LATE.format(body="time.sleep(2)"))
    with VerifierPool(check, num_workers=1, timeout=1.0) as pool:
        np.testing.assert_array_equal(pool.submit(texts("3")).collect().total, [3.0])
    file.write_text(LATE.format(body="raise ImportError('no such library')"))
    with (
        VerifierPool(check, num_workers=1) as pool,
        pytest.raises(StopError, match=r"could not be imported: ImportError: no such"),
    ):
        pool.submit(texts("3")).collect()


KILLED = """
import sys, numpy as np, toy_verifier
from rlhf_jax.verification import pool
from rlhf_jax.roles.rewards.text import Texts

with pool.VerifierPool(toy_verifier.check, num_workers=1) as running:
    row = {"made": sys.argv[1]}
    running.submit(Texts(["p"], ["made"], [row], np.zeros(1))).collect()
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_and_clear_away_when_the_run_is_killed(tmp_path, by):
    made = tmp_path / "made"
    places = [Path(rlhf_jax.__file__).parents[1], Path(toy_verifier.__file__).parent]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, made],
        env={"PYTHONPATH": ":".join(map(str, places)), "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.DEVNULL,
    )
    until(made.exists)
    process.send_signal(by)
    process.wait()
    until(lambda: not made.exists())


def test_a_worker_ends_where_python_drops_what_its_handler_raises(tmp_path):
    """In a callback of the garbage collector, such as JAX's."""
    made = tmp_path / "made"
    with VerifierPool(toy_verifier.check, num_workers=1) as running:
        running.submit(texts("collect", row={"made": str(made)}))
        until(made.exists)
    until(lambda: not made.exists())


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_pool_that_never_started_ends_at_once():
    with VerifierPool(toy_verifier.check):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers: expected a whole number, 1 or more, got 0"),
        ({"num_workers": 1.5}, "num_workers: expected a whole number, 1 or more, got"),
        ({"timeout": 0.0}, "timeout: expected a finite number above 0, got 0.0"),
        ({"timeout": float("inf")}, "timeout: expected a finite number above 0"),
        (
            {"on_failure": "ignore"},
            "on_failure: expected one of 'leave_out', 'zero', 'stop', got",
        ),
    ],
)
def test_options_that_make_no_pool(options, message):
    with pytest.raises(InputError, match=message):
        VerifierPool(toy_verifier.check, **options)


def test_long_texts_are_cut_in_messages(pool, capsys):
    pool.submit(texts("x" * 100_000)).collect()
    errors = capsys.readouterr().err
    assert "could not convert string to float" in errors
    assert len(errors) < 1500


def test_a_verifier_may_look_for_main():
    pattern = verifiers.Matches(r'if __name__ == "__main__"')
    with VerifierPool(pattern):
        pass


@pytest.mark.parametrize("name", ["failed", "timed_out", "left_out"])
def test_a_count_has_no_name_of_a_figure_of_every_verifier(name):
    class Counts:
        counts = ("calls", name)

        def judge(self, prompt, response, row):
            raise AssertionError

    with pytest.raises(InputError, match=f"other than {name}, which every verifier"):
        VerifierPool(Counts())


def test_a_verifier_that_cannot_be_sent():
    with pytest.raises(InputError, match=r"processes can import: .* got <function"):
        VerifierPool(lambda prompt, response, row: 1.0)


CODES = {
    "def f(): return 1": {"total"},
    "def f(): return 2": set(),
    "import pandas": {"refused"},
    "def f():\n    while True: pass": {"code_timed_out"},
    "import os\nos._exit(0)": {"suspicious"},
}


@pytest.mark.slow
def test_what_a_verifier_counts_is_a_share_of_all():
    """Of five programs one each is refused, too slow, suspicious and correct."""
    verifier = PythonTests(extract="whole", seconds=2.0, unsafe=True)
    with VerifierPool(verifier, num_workers=1, timeout=60.0) as pool:
        asked = texts(*CODES, row={"tests": "assert f() == 1"})
        scores = pool.submit(asked).collect()
    np.testing.assert_array_equal(scores.total, ["total" in w for w in CODES.values()])
    names = ("refused", "code_timed_out", "suspicious")
    for name in names:
        np.testing.assert_array_equal(
            scores.parts[name], [name in words for words in CODES.values()]
        )
    stats = masked.mean_stats(rewards.part_stats(scores))
    for name in names:
        assert float(stats[f"reward/{name}"]) == pytest.approx(1 / 5)
