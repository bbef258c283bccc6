import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import rewards, verifiers
from rlhf_jax.data import json_lines
from rlhf_jax.functional.checks import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", "12"),
        (" 12. ", "12"),
        ("-7", "-7"),
        ("−7", "-7"),
        ("+7", "7"),
        ("1,000,000", "1000000"),
        ("$1,234.50", "1234.5"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        ("€.50", "0.5"),
        ("0.30", "0.3"),
        ("-0", "0"),
    ],
)
def test_numbers_as_people_write_them(text, value):
    assert verifiers.number(text) == Decimal(value)
    assert verifiers.last_number(f"so it is {text}") == Decimal(value)


@pytest.mark.parametrize(
    "text",
    ["", ".", "-", "1,2345", "12,34", "1.2.3", "1e5", "1/2", "nan", "inf", "5 6"],
)
def test_what_is_not_one_number(text):
    assert verifiers.number(text) is None


@pytest.mark.parametrize(
    ("response", "gold", "right"),
    [
        ("12.", 12, True),
        ("3+4=7, 7+5=12", "12", True),
        ("3+4=7, 7+5=12", "7", False),
        ("12.0", 12, True),
        ("12.5", 12, False),
        ("12.5", 5, False),
        ("I owe 1,200 dollars.", 1200, True),
        ("so x = -5", -5, True),
        ("so x = -5", 5, False),
        ("so x = - 5", -5, True),
        ("so x = –5", -5, True),
        (r"it costs -\$5", -5, True),
        ("5 - 3", 3, True),
        (f"-{10**31 + 1}", -(10**31) - 1, True),
        (f"-{10**31 + 1}", -(10**31) - 2, False),
        ("5-3", 3, True),
        ("(5) -3", -3, True),
        ("page.12", 12, True),
        ("7,8,15", 15, True),
        ("12/4=3", 3, True),
        ("it is 8/4", 4, False),
        ("it is 8/4", 2, False),
        ("<1+2+3>6.", "6", True),
        ("", 0, False),
        ("none", 0, False),
    ],
)
def test_the_last_integer(response, gold, right):
    verify = verifiers.LastInteger("sum")
    assert verify("<p>", response, {"sum": gold}) == float(right)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("so 2 + 2.\n#### 1,000", True),
        ("####1000", True),
        ("#### $1,000.00.", True),
        ("#### 1000 clips", True),
        ("#### **1000**", True),
        (r"#### \$1000", True),
        ("#### $ 1000", True),
        ("#### 1000\n2. Then", True),
        ("#### - 1000", False),
        ("#### 1000 1/2", False),
        ("#### 1000 - 3", False),
        ("#### 1000**3", False),
        ("#### 1000x10", False),
        ("#### 1000_000", False),
        ("#### 1000 or 1001", False),
        ("#### 1000, not 7", False),
        ("#### 1000:30", False),
        ("#### 1000%", True),
        ("#### 7\n#### 1000", True),
        ("#### 1000\n#### 7", False),
        ("#### -1000", False),
        ("#### 1000.5", False),
        ("#### 1,0000", False),
        ("#### 1000.0.0", False),
        ("#### 1000e3", False),
        ("#### 1000/2", False),
        ("#### 1000 / 2", False),
        ("#### 1000^2", False),
        ("#### about 1000", False),
        ("####", False),
        ("it is 1000", False),
        ("", False),
    ],
)
def test_the_number_after_the_last_marker(answer, right):
    row = {"answer": "2 * 500 = <<2*500=1000>>1000\n#### 1,000"}
    assert verifiers.Gsm8k()("q", answer, row) == float(right)


@pytest.mark.parametrize(
    ("verifier", "response", "answer"),
    [
        (verifiers.Gsm8k(), "so\n#### $1,000.50", "1000.5"),
        (verifiers.Gsm8k(), "#### 1000", "1000"),
        (verifiers.Gsm8k(), "#### 1000.00.", "1000"),
        (verifiers.Gsm8k(), f"#### {10**31 + 1}", str(10**31 + 1)),
        (verifiers.Gsm8k(), "#### -0.0", "0"),
        (verifiers.Gsm8k(), "#### about 5", None),
        (verifiers.Gsm8k(), "it is 5", None),
        (verifiers.Gsm8k(unmarked="last_number"), "it is 5.10", "5.1"),
        (verifiers.LastInteger(), "3 + 4 = 07", "7"),
        (verifiers.LastInteger(), "none", None),
        (verifiers.ExactMatch(), " two  dogs ", "two dogs"),
        (verifiers.ExactMatch(ignore_case=True), "Two", "two"),
        (verifiers.ExactMatch(), " ", None),
    ],
)
def test_the_answer_that_a_verifier_reads(verifier, response, answer):
    assert isinstance(verifier, verifiers.Answering)
    assert verifier.answer(response) == answer


def test_without_a_marker_the_last_number_may_count():
    row = {"answer": "#### 12"}
    lenient = verifiers.Gsm8k(unmarked="last_number")
    assert lenient("q", "3 + 9, that is 12.", row) == 1
    assert verifiers.Gsm8k()("q", "3 + 9, that is 12.", row) == 0
    # A marker still decides.
    assert lenient("q", "#### 3\nno, 12", row) == 0
    assert lenient("q", "", row) == 0


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("part", ["train", "test"])
def test_every_row_of_gsm8k(shared_data, part):
    """Against the expression of openai/grade-school-math, with commas stripped."""
    file = shared_data / "gsm8k" / f"{part}.jsonl"
    rows = json_lines.read_jsonl(file)
    verify = verifiers.Gsm8k()
    verifiers.check_answers([(row.where, row) for row in rows], verifier=verify)
    assert len(rows) == {"train": 7473, "test": 1319}[part]
    published = [
        re.search(r"#### (\-?[0-9\.\,]+)", row["answer"])[1].replace(",", "")
        for row in rows
    ]
    golds = [verify.gold(row) for row in rows]
    assert golds == [Decimal(text) for text in published]
    answers = [row["answer"] for row in rows]
    score = verifiers.each(verify)
    questions = [row["question"] for row in rows]
    assert score(questions, answers, rows) == [1.0] * len(rows)
    # Another question's answer is right where the numbers happen to be the same.
    shifted = score(questions, answers[1:] + answers[:1], rows)
    same = [a == b for a, b in zip(golds, golds[1:] + golds[:1], strict=True)]
    assert shifted == [float(equal) for equal in same]
    assert sum(same) < 0.1 * len(rows)
    # A float comparison of texts would tell these apart; people do not.
    reworded = [f"The answer is\n#### ${gold:,.2f}." for gold in golds]
    assert score(questions, reworded, rows) == [1.0] * len(rows)


def test_exact_match_and_its_options():
    row = {"answer": "The  Cat\n"}
    assert verifiers.ExactMatch()("p", " The Cat", row) == 1
    assert verifiers.ExactMatch()("p", "the cat", row) == 0
    assert verifiers.ExactMatch(ignore_case=True)("p", "the CAT", row) == 1
    assert verifiers.ExactMatch(ignore_space=False)("p", "The Cat", row) == 0
    assert verifiers.ExactMatch(ignore_space=False)("p", "The  Cat\n", row) == 1
    assert verifiers.ExactMatch(field="gold")("p", "a", {"gold": "a"}) == 1


def test_regular_expressions():
    boxed = verifiers.Matches(r"\\boxed\{(.*?)\}", field="answer")
    row = {"answer": " x+1 "}
    assert boxed("p", r"\boxed{y} or \boxed{ x+1}", row) == 1
    assert boxed("p", r"\boxed{x+1} or \boxed{y}", row) == 0
    assert boxed("p", "x+1", row) == 0
    assert verifiers.Matches(r"(a)|b", field="answer")("p", "b", row) == 0
    form = verifiers.Matches(r"^<think>.+</think>\s*\S")
    assert form("p", "<think>so\nso</think>\n12", {}) == 1
    assert form("p", "<think></think> 12", {}) == 0


@pytest.mark.parametrize(
    ("pattern", "field", "message"),
    [
        ("(", None, r"expected a regular expression, got '\(' \(missing \)"),
        ("a", "answer", r"expected a group \(\.\.\.\) to compare with 'answer'"),
    ],
)
def test_patterns_that_cannot_be_used(pattern, field, message):
    with pytest.raises(InputError, match=message):
        verifiers.Matches(pattern, field=field)


LAST, GSM8K, EXACT = verifiers.LastInteger(), verifiers.Gsm8k(), verifiers.ExactMatch()


@pytest.mark.parametrize(
    ("verifier", "row", "message"),
    [
        (LAST, {"question": "a"}, "expected a field 'answer', got 'question'; add"),
        (LAST, {"answer": None}, "expected an integer in 'answer', got None"),
        (LAST, {"answer": "twelve"}, "expected an integer in 'answer', got 'twelve'"),
        (LAST, {"answer": True}, "expected an integer in 'answer', got True"),
        (LAST, {"answer": float("nan")}, "expected an integer in 'answer', got nan"),
        (LAST, {"answer": "12.5"}, "expected an integer in 'answer', got '12.5'"),
        (GSM8K, {"answer": "12"}, "expected #### and a number at the end of 'answer'"),
        (GSM8K, {"answer": "#### "}, "expected #### and a number .* got '#### '"),
        (GSM8K, {"answer": "#### 1/2"}, "expected #### and a number .* '#### 1/2'"),
        (GSM8K, {"answer": 12}, "expected #### and a number .* got 12"),
        (EXACT, {"answer": ""}, "expected a text in 'answer', got ''"),
        (
            verifiers.Matches("(a)", field="gold"),
            {"answer": "a"},
            "expected a field 'gold', got 'answer'",
        ),
    ],
)
def test_answers_that_cannot_be_read_are_named_with_file_and_line(
    tmp_path, verifier, row, message
):
    good = {"answer": {LAST: 3, GSM8K: "#### 3"}.get(verifier, "a"), "gold": "a"}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n\n" for line in (good, row)))
    located = [(row.where, row) for row in json_lines.read_jsonl(file)]
    with pytest.raises(InputError, match=f"rows.jsonl:3: {message}"):
        verifiers.check_answers(located, verifier=verifier)
    # And later, where nobody checked, a reward names the prompt (test_rewards.py).
    with pytest.raises(ValueError, match=message):
        verifier("p", "r", row)


def test_a_verifier_as_a_reward():
    class Answers:
        tokens = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
        mask = np.ones((2, 3), bool)
        response_mask = np.array([[0, 0, 1], [0, 1, 1]], bool)
        index = np.array([1, 0], np.int32)

    reward = rewards.TextReward(
        function=verifiers.each(verifiers.LastInteger("gold")),
        decode=lambda ids: " ".join(map(str, ids)),
        rows=[{"gold": 6}, {"gold": 4}],
    )
    scores = reward(Answers())
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, [0.0, 1.0])
    lacking = rewards.TextReward(reward.function, reward.decode, [{"gold": 6}, {}])
    with pytest.raises(InputError, match=r"field 'gold', got ; .*'1 2' \(row 1 of the"):
        lacking(Answers())


def test_processes_that_verify_load_no_jax():
    """A fresh interpreter also imports no other slow module."""
    code = (
        "import sys; "
        "from rlhf_jax.verification import worker; "
        "from rlhf_jax.verification.code import verifier; "
        "from rlhf_jax.roles.rewards import verifiers; "
        "assert worker.verify(verifiers.Gsm8k(), '', '#### 3', "
        "{'answer': '#### 3'}) == (1.0, {}); "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(rlhf_jax.__file__).parent.parent,
    )
    assert not {"jax", "numpy"} & set(done.stdout.split())
