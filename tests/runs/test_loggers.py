"""Trackio itself stores the metrics on this machine."""

import math
from pathlib import Path

import pytest

from rlhf_jax.runs import loggers
from rlhf_jax.runs.alarms import Alarm


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        # Read when the package is imported, which nothing else here does.
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        pytest.importorskip("trackio", reason="extra trackio")
    return tmp_path_factory.mktemp("runs")


def played(folder, *, begin, end, alarm=None):
    """Writes steps as `metrics.Recorder` does; returns the Trackio run's name."""
    folder.mkdir(exist_ok=True)
    sink = loggers.Trackio(folder, config={"seed": 1, "lora": {"rank": None}})
    for stage in ("sft", "ppo"):
        sink.begin(stage, begin)
        for step in range(begin, end):
            active = [Alarm("kl", alarm, "too far")] if alarm is not None else []
            row = {"x": step + 0.5, "none": None, "bad": math.nan, "top": math.inf}
            sink.write(stage, step, row, active if stage == "ppo" else [])
    sink.close()
    return (folder / "trackio.txt").read_text()


def logs(name):
    from trackio import SQLiteStorage

    return SQLiteStorage.get_logs("rlhf_jax", name)


def test_a_resume_goes_on_with_its_run(folder):
    name = played(folder / "one", begin=0, end=2)
    assert played(folder / "one", begin=2, end=4) == name
    rows = [
        {key: value for key, value in row.items() if key != "timestamp"}
        for row in logs(name)
    ]
    assert [row.pop("step") for row in rows] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert rows[3].keys() == {"ppo/x", "ppo/bad", "ppo/top"}  # None is not measured
    assert [row.get("ppo/x") for row in rows if "ppo/x" in row] == [0.5, 1.5, 2.5, 3.5]
    assert rows[0]["sft/x"] == 0.5
    assert math.isnan(rows[0]["sft/bad"])
    assert rows[0]["sft/top"] == math.inf


def test_two_folders_of_one_name_are_two_runs(folder):
    names = []
    for parent in ("a", "b"):
        (folder / parent).mkdir()
        names.append(played(folder / parent / "ppo", begin=0, end=1))
    assert len(set(names)) == 2
    assert all(name.startswith("ppo-") for name in names)
    assert [len(logs(name)) for name in names] == [2, 2]


def test_an_alarm_is_an_alert_once(folder, capsys):
    import trackio

    name = played(folder / "three", begin=0, end=4, alarm=2)
    (run,) = [run for run in trackio.Api().runs("rlhf_jax") if run.name == name]
    (alert,) = run.alerts()
    assert (alert["title"], alert["text"]) == ("ppo step 2: kl", "too far")
    assert alert["step"] == 2
    assert run.config["seed"] == 1
    assert "ppo step 2: kl" in capsys.readouterr().out
