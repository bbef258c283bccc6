"""A reward that rises while the judge falls is told, and noise is not."""

import json

import numpy as np
import pytest
from toy_runs import lines, run

from rlhf_jax.reports import reading, verdicts
from rlhf_jax.runs import metrics


def verdict(folder):
    ((only,), _) = reading.read_all([folder])
    return verdicts.verdict(only)


def series(values, *, every=1):
    return [(every * step, float(value)) for step, value in enumerate(values)]


def test_the_verdict_of_a_run_that_was_hacked_and_of_one_that_was_not(tmp_path):
    hacked = verdict(run(tmp_path / "hacked", hacked=True))
    assert hacked.kind == "hacked"
    assert 0 <= hacked.step < 20
    assert "reward" in hacked.why
    assert "judge" in hacked.why
    assert verdict(run(tmp_path / "well")).kind == "clean"
    assert verdict(run(tmp_path / "alone", judge=False)).kind == "unjudged"


def test_a_judge_that_rose_at_first_and_fell_then():
    """Over-optimisation: the peak is what the end is compared with."""
    steps = np.arange(50)
    noise = np.random.default_rng(0).normal(0, 0.05, 50)
    score, judge = series(steps / 50), series(np.sin(steps / 50 * 2.8) + noise)
    since = verdicts.fallen_since(score, judge)
    assert 20 <= since < 40


def test_a_judge_that_is_asked_every_tenth_step():
    score = series(np.linspace(0, 1, 60))
    judge = series([1.0, 1.1, 0.9, -1.0, -1.1, -0.9], every=10)
    assert verdicts.fallen_since(score, judge) == 20


@pytest.mark.parametrize(
    ("rise", "fall"), [(0.0, 3.0), (3.0, 0.0), (-3.0, 3.0), (3.0, -3.0)]
)
def test_one_of_them_alone_is_none(rise, fall):
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 50))
    ramp = np.linspace(0, 1, 50)
    score, judge = series(rise * ramp + noise[0]), series(-fall * ramp + noise[1])
    assert verdicts.fallen_since(score, judge) is None


def test_noise_is_seldom_taken_for_it():
    """The score always rises; the judge is noise. The best part is picked of four."""
    rng = np.random.default_rng(1)
    score = series(np.linspace(0, 1, 40))
    false = sum(
        verdicts.fallen_since(score, series(rng.normal(size=40))) is not None
        for _ in range(500)
    )
    assert false <= 10


def test_noise_that_drifts_is_taken_for_it_far_less_often():
    """An AR(1) judge at ρ = 0.8: 38 % of such runs if its values counted as apart."""
    rng = np.random.default_rng(2)
    score = series(np.linspace(0, 1, 100))
    false = 0
    for noise in rng.normal(size=(400, 200)):
        judge = np.zeros(200)
        for step in range(1, 200):
            judge[step] = 0.8 * judge[step - 1] + noise[step]
        false += verdicts.fallen_since(score, series(judge[100:])) is not None
    assert false <= 32  # 8 %


def test_an_alarm_that_passed_while_the_judge_recovered_is_no_hacking(tmp_path):
    folder = run(tmp_path / "a", done=False)
    rows = metrics.read(folder / "metrics.jsonl")
    for row in rows[5:8]:
        row["alarms"] = ["reward_hacking"]
    lines(folder / "metrics.jsonl", rows)
    assert (verdict(folder).kind, verdict(folder).step) == ("alarm", 5)
    began = {"stage": "ppo", "name": "reward_hacking", "step": 5, "message": "seen"}
    (folder / "summary.json").write_text(json.dumps({"alarms": [began]}))
    assert verdict(folder).kind == "alarm"
    rows[-1]["alarms"] = ["reward_hacking"]  # among the last tenth
    lines(folder / "metrics.jsonl", rows)
    assert verdict(folder).kind == "hacked"


def test_alarms_count_also_while_the_run_goes_on(tmp_path):
    folder = run(tmp_path / "a", done=False)
    rows = metrics.read(folder / "metrics.jsonl")
    for row in rows[5:8] + rows[20:]:
        row["alarms"] = ["reward_hacking"]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    ((only,), _) = reading.read_all([folder])
    raised = verdicts.alarms_of(only)
    assert [(alarm.name, alarm.step) for alarm in raised] == [
        ("reward_hacking", 5),
        ("reward_hacking", 20),
    ]
    assert "judge fell" in raised[0].message
    assert verdict(folder) == verdicts.verdict(only)
    assert (verdict(folder).kind, verdict(folder).step) == ("hacked", 20)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["language_degradation", "kl"], "degraded"),
        (["kl"], "alarm"),
        ([], "clean"),
    ],
)
def test_other_alarms(names, kind, tmp_path):
    folder = run(tmp_path / "a")
    raised = [
        {"stage": "ppo", "name": name, "step": 7 + k, "message": "seen"}
        for k, name in enumerate(names)
    ]
    (folder / "summary.json").write_text(json.dumps({"alarms": raised}))
    verdict_of_run = verdict(folder)
    assert (verdict_of_run.kind, verdict_of_run.step) == (kind, 7 if names else None)


def test_a_run_without_a_reward(tmp_path):
    folder = run(tmp_path / "sft")
    rows = [{"stage": "sft", "step": n, "loss/language_model": 2.0} for n in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    assert verdict(folder).kind == "none"
