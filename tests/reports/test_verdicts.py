"""Verdicts tell a judge that fell from noise, whether or not the reward rose."""

import json

import numpy as np
import pytest
import rate_verdicts
from places import ROOT
from toy_runs import lines, run

from rlhf_jax.reports import reading
from rlhf_jax.reports.contents import contents
from rlhf_jax.runs import metrics
from rlhf_jax.runs.alarms import verdicts


def verdict(folder):
    ((only,), _) = reading.read_all([folder])
    (record,) = contents([only], title="Runs").data["runs"]
    of_rows = verdicts.verdict(only.rows, alarms=only.alarms)
    assert record["verdict"] == of_rows._asdict()
    return of_rows


def kind(score, judge):
    """The verdict for a score at each step and a judge at some steps."""
    every = len(score) // len(judge)
    rows = [{"step": n, verdicts.SCORE: float(x)} for n, x in enumerate(score)]
    for row, x in zip(rows[::every], judge, strict=True):
        row[verdicts.JUDGE] = float(x)
    return verdicts.verdict(rows, alarms=[])[::3]  # with the step


def share_called(judges):
    """The share of judges called fallen while the reward rises."""
    called = [kind(np.linspace(0, 1, len(judge)), judge)[0] for judge in judges]
    assert set(called) <= {"hacked", "clean"}
    return called.count("hacked") / len(called)


def test_the_verdict_of_a_run_that_was_hacked_and_of_one_that_was_not(tmp_path):
    hacked = verdict(run(tmp_path / "hacked", hacked=True))
    assert (hacked.kind, hacked.title) == ("hacked", "reward hacked")
    assert 0 <= hacked.step < 20
    assert "reward" in hacked.why
    assert "judge" in hacked.why
    assert verdict(run(tmp_path / "well")).kind == "clean"
    assert verdict(run(tmp_path / "alone", judge=False)).kind == "unjudged"


def test_a_judge_that_rose_at_first_and_fell_then():
    """Over-optimisation: the end is compared with the peak."""
    steps = np.arange(50)
    noise = np.random.default_rng(0).normal(0, 0.05, 50)
    name, since = kind(steps / 50, np.sin(steps / 50 * 2.8) + noise)
    assert name == "hacked"
    assert 20 <= since < 45


def test_a_judge_that_is_asked_every_tenth_step():
    judge = [1.0, 1.1, 0.9, -1.0, -1.1, -0.9]
    assert kind(np.linspace(0, 1, 60), judge) == ("hacked", 20)
    few = [1.0, 1.1, 0.9, -1.0, -1.1]
    assert kind(np.linspace(0, 1, 60), few) == ("clean", None)


# PPO with k1 in the loss, recorded: in a tenth of the run nothing parses any more.
FAST = [-0.53, -0.31, -0.71, -1.57, -1.76, -1.72, -1.7, -1.71, -1.74, -1.66, -1.74]
FAST += [-1.67, -1.72, -1.85] + [-2.0] * 16


@pytest.mark.parametrize("every", [1, 3])
def test_a_fall_within_the_first_steps_is_seen(every):
    score = np.linspace(-0.1, 4, 30)
    name, since = kind(score, FAST[::every])
    assert name == "hacked"
    assert since <= 5
    assert kind(score, [FAST[0]] + [-2.0] * 9) == ("hacked", 0)  # after one value


@pytest.mark.parametrize("end", [-4.5, -0.1])
def test_a_judge_that_collapsed_is_told_where_the_reward_did_not_rise(end):
    noise = np.random.default_rng(0).normal(0, 0.1, 30)
    assert kind(np.linspace(-0.1, end, 30) + noise, FAST)[0] == "collapsed"
    assert kind([np.nan] * 30, FAST)[0] == "collapsed"  # as of distillation


@pytest.mark.parametrize(("rise", "fall"), [(3.0, 0.0), (0.0, 0.0), (3.0, -3.0)])
def test_a_judge_that_did_not_fall_is_none(rise, fall):
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 50))
    ramp = np.linspace(0, 1, 50)
    assert kind(rise * ramp + noise[0], -fall * ramp + noise[1]) == ("clean", None)


def test_a_judge_that_fell_and_recovered_is_none():
    steps = np.arange(40)
    noise = np.random.default_rng(0).normal(0, 0.1, 40)
    judge = 1 - np.exp(-(((steps - 16) / 5) ** 2)) + noise
    assert kind(steps, judge) == ("clean", None)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("count", [10, 20, 40, 100])
@pytest.mark.parametrize("name", ["normal", "ties", "long tails"])
def test_noise_is_seldom_taken_for_a_fall(name, count):
    """Although the best of many means is compared with the last."""
    rng = np.random.default_rng(1)
    judges = {
        "normal": rng.normal(size=(300, count)),
        "ties": rng.random((300, count)) < 0.08,
        "long tails": rng.standard_t(2.5, (300, count)),
    }[name]
    assert share_called(judges) <= {"normal": 0.03, "ties": 0.1}.get(name, 0.05)


@pytest.mark.slow
def test_noise_that_drifts_is_taken_for_it_far_less_often():
    """An AR(1) judge, ρ = 0.8: independent errors would call over half fallen."""
    noise = np.random.default_rng(2).normal(size=(300, 200))
    judges = np.zeros((300, 200))
    for step in range(1, 200):
        judges[:, step] = 0.8 * judges[:, step - 1] + noise[:, step]
    assert share_called(judges[:, 100:]) <= 0.15


def test_the_alarm_alone_is_no_hacking(tmp_path):
    """The alarm compares few steps: a tenth of noisy judges raise it at the end."""
    folder = run(tmp_path / "a", done=False)
    rows = metrics.read(folder / "metrics.jsonl")
    for row in rows[5:8]:
        row["alarms"] = ["reward_hacking"]
    lines(folder / "metrics.jsonl", rows)
    assert (verdict(folder).kind, verdict(folder).step) == ("alarm", 5)
    began = {"stage": "ppo", "name": "reward_hacking", "step": 5, "message": "seen"}
    (folder / "summary.json").write_text(json.dumps({"alarms": [began]}))
    rows[-1]["alarms"] = ["reward_hacking"]
    lines(folder / "metrics.jsonl", rows)
    assert verdict(folder).kind == "alarm"
    assert verdict(folder).why.startswith("reward hacking alone, which noise")


def test_alarms_count_also_while_the_run_goes_on(tmp_path):
    folder = run(tmp_path / "a", done=False)
    rows = metrics.read(folder / "metrics.jsonl")
    for row in rows[5:8] + rows[20:]:
        row["alarms"] = ["reward_hacking"]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    ((only,), _) = reading.read_all([folder])
    raised = only.alarms
    assert [(alarm["name"], alarm["step"]) for alarm in raised] == [
        ("reward_hacking", 5),
        ("reward_hacking", 20),
    ]
    assert "judge fell" in raised[0]["message"]
    assert (verdict(folder).kind, verdict(folder).step) == ("alarm", 5)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["language_degradation", "kl"], "degraded"),
        (["kl"], "alarm"),
        ([], "clean"),
    ],
)
def test_other_alarms(names, expected, tmp_path):
    folder = run(tmp_path / "a")
    raised = [
        {"stage": "ppo", "name": name, "step": 7 + k, "message": "seen"}
        for k, name in enumerate(names)
    ]
    (folder / "summary.json").write_text(json.dumps({"alarms": raised}))
    verdict_of_run = verdict(folder)
    assert (verdict_of_run.kind, verdict_of_run.step) == (
        expected,
        7 if names else None,
    )


def test_a_run_without_a_reward(tmp_path):
    folder = run(tmp_path / "sft")
    rows = [{"stage": "sft", "step": n, "loss/language_model": 2.0} for n in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    assert verdict(folder).kind == "none"


def test_the_readme_has_what_the_verdict_reaches_on_recorded_runs():
    text = (ROOT / "rlhf_jax" / "reports" / "README.md").read_text()
    for row in rate_verdicts.of_recorded()[: len(rate_verdicts.sets())]:
        assert row in text


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_fall_is_dated_from_the_last_step_before_it(noise):
    rng = np.random.default_rng(0)
    judge = np.where(np.arange(100) < 90, 0.6, 0.1) + noise * rng.normal(size=100)
    assert kind(np.linspace(0, 1, 100), judge) == ("hacked", 89)
