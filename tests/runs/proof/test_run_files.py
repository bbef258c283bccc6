"""What a run folder records of its files: sealed, damaged, or of an older version."""

import json

import pytest
import toy_runs

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.runs.proof import run_files

READ = ("config.json", "metrics.jsonl")


@pytest.fixture
def run(tmp_path):
    return toy_runs.run(tmp_path / "run", steps=12)


def test_a_sealed_run_is_whole(run):
    checked = run_files.check(run)
    assert checked == (5, [], [], [], [])  # config, metrics, timings, samples, summary
    assert run_files.check(run, only=READ) == (3, [], [], [], [])
    assert run_files.require(run, only=READ, instead="") == []
    proof = json.loads((run / "summary.json").read_text())["proof"]
    assert list(proof["files"]) == sorted(
        ["config.json", "metrics.jsonl", "samples.jsonl", "timings.jsonl"]
    )
    assert "proof" not in folder.read_summary(run)


def test_a_run_inside_of_another_one_is_not_sealed_with_it(run):
    """It may still be under way when the outer one ends."""
    inner = toy_runs.run(run / "eval" / "first", steps=3, done=False)
    (run / "notes").mkdir()
    (run / "notes" / "a.txt").write_text("a")
    folder.write_summary(run, {})
    with (inner / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "step": 3}\n')
    assert run_files.check(run).faults == []
    proof = json.loads((run / "summary.json").read_text())["proof"]
    assert [name for name in proof["files"] if "/" in name] == ["notes/a.txt"]
    assert "eval/first/metrics.jsonl" in run_files.check(run).added


def test_each_damage_is_named_and_others_are_not(run):
    (run / "samples.jsonl").unlink()
    metrics = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(metrics.replace(b'"step": 3', b'"step": 4'))
    (run / "notes.txt").write_text("mine")  # is none
    checked = run_files.check(run)
    assert checked.faults[0].startswith("metrics.jsonl: SHA-256 ")
    assert checked.faults[1:] == ["samples.jsonl: missing"]
    assert (checked.whole, checked.added) == (3, ["notes.txt"])
    assert run_files.check(run, only=["timings.jsonl"]).faults == []
    with pytest.raises(InputError, match=r"wrote, got\n  metrics.jsonl: SHA-256.*\nno"):
        run_files.require(run, only=READ, instead="no")


def test_a_damaged_summary_is_a_fault_and_one_without_a_proof_is_not(run):
    text = (run / "summary.json").read_text()
    (run / "summary.json").write_text(text.replace("true", "false"))
    (fault,) = run_files.check(run).faults
    assert fault.startswith("summary.json: SHA-256 ")
    (run / "summary.json").write_text('{"alarms": []}')  # of an older version
    checked = run_files.check(run)
    assert not checked.faults
    assert checked.unproven == ["written by a version without sums of files"]
    (run / "summary.json").unlink()
    assert run_files.check(run).later == ["no snapshot is complete yet"]


def test_locks_models_and_snapshots_have_no_sums_of_their_own(run):
    for name in (
        *("run.lock", "model/config.json", "model.sha256", "plots/kl.png"),
        *("snapshots/ppo/4/files.json", "snapshots/ppo/4/arrays/a"),
        *("snapshots/ppo/2/meta/metadata",),  # without a list: the run was killed
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    folder.write_summary(run, {})
    proof = json.loads((run / "summary.json").read_text())["proof"]
    assert [name for name in proof["files"] if not name.endswith("l")] == [
        *("config.json", "model.sha256", "plots/kl.png"),
        *("snapshots/ppo/2/meta/metadata", "snapshots/ppo/4/files.json"),
    ]
