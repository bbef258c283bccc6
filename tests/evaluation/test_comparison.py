"""Win rates by scores, and by a judge with both orders."""

import numpy as np
import pytest

from rlhf_jax.evaluation import comparison
from rlhf_jax.functional.checks import InputError, StopError

RNG = np.random.default_rng(0)
PAIRS = {
    "prompts": ["p", "q"],
    "responses": ["longer", "a"],
    "ref_responses": ["long", "bb"],
    "rows": [{"prompt": "p"}, {"prompt": "q"}],
}


def test_a_win_rate_counts_every_pair_and_half_a_tie():
    ours, theirs = RNG.integers(0, 3, size=5), RNG.integers(0, 3, size=4)
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in ours for b in theirs]
    assert 0 < np.mean(wins) < 1
    assert comparison.win_rate(ours, theirs) == pytest.approx(np.mean(wins))
    assert comparison.win_rate(theirs, ours) == pytest.approx(1 - np.mean(wins))
    assert comparison.win_rate(ours, ours) == 0.5
    with pytest.raises(InputError, match="expected scores of policy and reference"):
        comparison.win_rate([], [1.0])


def test_a_judge_is_asked_in_both_orders():
    calls = []

    def judge(prompts, first, second, rows):
        calls.append((prompts, first, second, rows))
        return [float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]

    verdicts = comparison.judged(judge, **PAIRS)
    assert verdicts == [(1.0, 1.0), (0.0, 0.0)]
    assert [verdict.win for verdict in verdicts] == [1.0, 0.0]
    assert [verdict.first for verdict in verdicts] == [0.5, 0.5]
    (prompts, first, second, rows), (_, first_again, second_again, _) = calls
    assert (prompts, rows) == (PAIRS["prompts"], PAIRS["rows"])
    assert (first, second) == (PAIRS["responses"], PAIRS["ref_responses"])
    assert (first_again, second_again) == (second, first)


def test_a_judge_that_prefers_the_first_says_nothing():
    verdicts = comparison.judged(lambda p, a, b, rows: [0.9] * len(p), **PAIRS)
    assert [verdict.win for verdict in verdicts] == pytest.approx([0.5, 0.5])
    assert [verdict.first for verdict in verdicts] == pytest.approx([0.9, 0.9])


def test_what_a_judge_does_to_its_lists_stays_there():
    def judge(prompts, first, second, rows):
        answer = [0.5] * len(prompts)
        prompts.clear()
        first.clear()
        rows[0]["prompt"] = "x"
        return answer

    assert len(comparison.judged(judge, **PAIRS)) == 2
    assert PAIRS["rows"][0] == {"prompt": "p"}


def stops(*_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda *_: None, "2 probabilities, .* got None; return a list of 2"),
        (lambda *_: [0.5], "2 probabilities, .* got 1; return a list of 2"),
        (lambda *_: [0.5, 2.0], "got 2.0 at index 1; .* numbers from 0 to 1"),
        (lambda *_: [float("nan"), 0.5], "got nan at index 0"),
        (lambda *_: {}["x"], "--judge raised KeyError: 'x' for a batch of 2 pairs"),
        (lambda *_: ({}["x"] for _ in "ab"), "--judge raised KeyError: 'x' for a b"),
    ],
)
def test_a_judge_that_fails(judge, message):
    with pytest.raises(InputError, match=message):
        comparison.judged(judge, **PAIRS, called="--judge")


def test_a_judge_that_ends_the_process():
    with pytest.raises(StopError, match=r"the judge called sys.exit\(3\)"):
        comparison.judged(stops, **PAIRS)
