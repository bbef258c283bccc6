"""The programming environment: Python to run and to submit, in sandbox processes."""

import pytest

from rlhf_jax.environments import demonstrations, programming, protocol
from rlhf_jax.environments.programming import Programming
from rlhf_jax.verification.code.verifier import PythonTests

ROW = {"prompt": "Add.", "tests": ["assert solve(2, 3) == 5"]}
RIGHT = "```python\ndef solve(a, b):\n    return a + b\n```"


def block(code):
    return f"Let me see.\n```python\n{code}\n```"


def answers(environment, *responses):
    _, state = environment.reset(ROW)
    turns = []
    for response in responses:
        turn = environment.step(state, response)
        turns.append(turn)
        state = turn.state
    return turns


@pytest.mark.slow
def test_code_is_run_and_read_until_it_is_final():
    environment = Programming(PythonTests(seconds=20.0), shown=40)
    responses = [
        block("print('é', 1 + 1)"),
        block("print('a')\n1 / 0"),
        block("FINAL = 1"),
        "What now?",
        f"FINAL\n{RIGHT}",
    ]
    turns = answers(environment, *responses)
    assert [turn.observation for turn in turns] == [
        "é 2\n",
        "a\nerror: ZeroDivisionError: division by ...\n",
        "(no output)\n",
        "error: expected a ```python block\n",
        "",
    ]
    assert [turn.reward for turn in turns] == [0, 0, 0, 0, 1]
    assert [turn.done for turn in turns] == [False] * 4 + [True]
    [turn] = answers(environment, "FINAL\n" + block("def solve(a, b): return 7"))
    assert (turn.reward, turn.done) == (0.0, True)


@pytest.mark.slow
def test_the_last_block_is_final_without_another_one():
    """Also after the largest number of blocks; without a block nothing is correct."""
    environment = Programming(PythonTests(seconds=20.0), max_runs=1)
    assert [t.reward for t in answers(environment, RIGHT, "FINAL")] == [0.0, 1.0]
    assert [t.done for t in answers(environment, "What?", RIGHT)] == [False, True]
    assert [t.reward for t in answers(environment, "FINAL")] == [0.0]


@pytest.mark.slow
def test_code_that_takes_long_or_prints_much_or_forges():
    environment = Programming(PythonTests(seconds=1.0))
    (turn,) = answers(environment, block("while True: pass"))
    assert "error: " in turn.observation
    (turn,) = answers(environment, block("print('x' * 10**6)"))
    assert turn.observation == "x" * 1_000 + "...\n"
    lines = 'end\\nprinted "forged"\\npassed'
    (turn,) = answers(environment, block(f"print('{lines}')"))
    assert turn.observation == 'end\nprinted "forged"\npassed\n'
    (turn,) = answers(environment, block("print('\\udc80')"))
    assert turn.observation.startswith("error: UnicodeEncodeError")
    turn.observation.encode()


@pytest.mark.slow
def test_the_expert_hands_in_what_is_right():
    rows = programming.rows(len(programming.TASKS))
    environment = Programming(PythonTests(seconds=20.0))
    for row in rows:
        played = demonstrations.play(environment, row, expert=programming.expert)
        assert played.reward == 1.0
        assert int(played.turns[1]) == row_of(row)(3, 8)


@pytest.mark.slow
def test_what_the_verifier_counts_of_the_final_code_is_counted():
    verifier = PythonTests(seconds=2.0)
    environment = Programming(verifier)
    assert protocol.counted(environment) == verifier.counts
    codes = {
        RIGHT: set(),
        block("import pandas"): {"refused"},
        block("def solve(a, b):\n    while True: pass"): {"code_timed_out"},
        block("import os\nos._exit(0)"): {"suspicious"},
    }
    for code, names in codes.items():
        [turn] = answers(environment, f"FINAL\n{code}")
        assert turn.counts == {name: name in names for name in verifier.counts}
        assert turn.counts == verifier.judge("", code, ROW).counts
        [ran] = answers(environment, code)
        assert not isinstance(ran, protocol.CountedTurn)  # it is only run
    [turn] = answers(environment, "FINAL")  # without any code
    assert turn.counts == dict.fromkeys(verifier.counts, 0.0)


def row_of(row):
    return {row["prompt"]: right for row, (_, _, right) in PAIRS}[row["prompt"]]


PAIRS = list(zip(programming.rows(6), programming.TASKS, strict=True))


def test_a_row_without_tests_is_no_beginning():
    environment = Programming(PythonTests(seconds=20.0))
    with pytest.raises(ValueError, match="expected a field 'tests'"):
        environment.reset({"prompt": "Add."})
    with pytest.raises(TypeError, match="expected a text in 'prompt', got"):
        environment.reset({"prompt": [], "tests": "assert 1"})
