"""Numbers of a run folder."""

import json

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.sweeps import measures
from rlhf_jax.sweeps.declaration import Measure

ROWS = [
    {"stage": "ppo", "step": 0, "objective/kl": 1.0, "pairs": 3.0},
    {"stage": "ppo", "step": 1, "objective/kl": 2.0},
    {"stage": "ppo", "step": 2, "objective/kl": 4.0, "alarms": ["kl"]},
    {"stage": "ppo", "step": 3, "objective/kl": None},
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
            "measure score: expected a number in metrics.jsonl of a run, got "
            "objective/scores, which no run has; there are objective/kl",
        ),
        (
            Measure(summary="policy.golds"),
            "a number in summary.json of a run, got policy.golds, which no run has; "
            "there are policy.gold",
        ),
    ],
)
def test_a_measure_that_nobody_has(run, measure, message):
    with pytest.raises(InputError) as error:
        measures.check({"score": measure}, runs=[run])
    assert message in str(error.value)
    measures.check({"kl": Measure(metric="objective/kl")}, runs=[run])
