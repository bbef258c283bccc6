"""Numbers of a run folder."""

import json

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.sweeps import measures, results
from rlhf_jax.sweeps.declaration import Measure

ROWS = [
    {"stage": "ppo", "step": 0, "objective/kl": 1.0, "pairs": 3.0},
    {"stage": "ppo", "step": 1, "objective/kl": 2.0},
    {"stage": "ppo", "step": 2, "objective/kl": 4.0, "alarms": ["kl"]},
    {"stage": "ppo", "step": 3, "loss/policy": None},
    {"stage": "ppo", "step": 4, "loss/policy": 1.0},
    {"stage": "ppo", "step": 5, "loss/value": 1.0},
    {"stage": "ppo", "step": 6, "loss/value": None},
]
SUMMARY = {"policy": {"gold": 1.5, "verified": True, "range": [1, 2]}, "seconds": 3}


@pytest.fixture
def run(tmp_path):
    text = "".join(f"{json.dumps(row)}\n" for row in ROWS)
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (Measure(metric="objective/kl"), 4.0),
        (Measure(metric="objective/kl", last=2), 3.0),
        (Measure(metric="objective/kl", last=9), 7 / 3),
        (Measure(metric="pairs"), 3.0),
        # A value that was not finite: the run had diverged there.
        (Measure(metric="loss/policy"), 1.0),
        (Measure(metric="loss/policy", last=2), None),
        (Measure(metric="loss/value"), None),
        (Measure(metric="alarms"), None),
        (Measure(metric="objective/scores"), None),
        (Measure(summary="policy.gold"), 1.5),
        (Measure(summary="seconds"), 3.0),
        (Measure(summary="policy.verified"), None),
        (Measure(summary="policy.gold.more"), None),
    ],
)
def test_a_number_of_a_run(run, measure, expected):
    assert measures.measured(run, measure) == expected


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (
            Measure(metric="objective/scores"),
            "measure score: expected a finite number in metrics.jsonl, got "
            "objective/scores, which no run has; known are objective/kl",
        ),
        (
            Measure(summary="policy.golds"),
            "a finite number in summary.json, got policy.golds, which no run has; "
            "known are policy.gold",
        ),
    ],
)
def test_a_measure_that_nobody_has(run, measure, message):
    kl_measure = Measure(metric="objective/kl")
    [message_of] = measures.absent({"score": measure, "kl": kl_measure}, runs=[run])
    assert message in message_of


def test_runs_that_are_not_counted_or_have_fewer_rows_are_told(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    rows = [json.dumps({"stage": "ppo", "step": 0, "objective/kl": 1.0})]
    (other / "metrics.jsonl").write_text(f"{rows[0]}\n")
    asked = {
        "kl": Measure(metric="objective/kl"),
        "mean": Measure(metric="objective/kl", last=3),
        "pairs": Measure(metric="pairs"),
        "none": Measure(metric="objective/scores", last=2),
    }
    assert measures.doubts(asked, runs=[run, other]) == [
        "mean: 1 of 2 runs have fewer than 3 rows with objective/kl, the least 1; "
        "their mean is over all of these",
        f"pairs: 1 of 2 runs have no finite number and are not counted, {other} first",
    ]
    assert measures.doubts({"kl": asked["kl"]}, runs=[run, other]) == []


def test_runs_without_files_or_with_broken_ones(tmp_path):
    assert measures.measured(tmp_path, Measure(metric="objective/kl")) is None
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(InputError, match=r"summary.json: expected the summary of a ru"):
        measures.measured(tmp_path, Measure(summary="seconds"))


def test_runs_of_other_versions_are_told(tmp_path):
    rewards = ["sha256 a", "sha256 a", "sha256 b", None]
    for number, code in enumerate(rewards):
        (tmp_path / str(number)).mkdir()
        versions = {"jax": "1"} | ({} if code is None else {"mine.py": code})
        recorded = json.dumps({"config": {}, "versions": versions})
        (tmp_path / str(number) / "config.json").write_text(recorded)
    runs = [tmp_path / str(number) for number in range(5)]  # the last records none
    assert results.mixed(runs) == [
        "mine.py is not the same in all runs: sha256 a in 2; sha256 b in 1; none in 1"
    ]
