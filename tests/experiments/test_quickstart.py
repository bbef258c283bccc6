"""The quickstart at toy size: the whole pipeline, also when killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import quickstart
from worlds import reviews

from rlhf_jax.runs import command_line, metrics

SCRIPT = Path(quickstart.__file__)
TOY = [
    *("--num-steps=3", "--sft-steps=6", "--reward-steps=3", "--num-pairs=64"),
    *("--hidden-size=16", "--num-layers=1", "--num-heads=2", "--batch-size=8"),
    *("--sft-batch-size=8", "--num-epochs=2", "--num-minibatches=2"),
    *("--num-evaluated=32", "--sample-every=1", "--snapshot-every=2"),
]


def play(out: Path, *options: str) -> dict:
    argv = ["--out", str(out), *TOY, *options]
    command_line.main(quickstart.main, quickstart.Config, description="", argv=argv)
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "run"
    return out, play(out)


@pytest.mark.slow
def test_the_summary_holds_what_is_promised(toy):
    out, summary = toy
    assert summary.keys() >= {
        *("gold_reference", "gold_policy", "gold_reference_std"),
        *("fluency_reference", "fluency_policy"),
        *("distinct_reference", "distinct_policy"),
        *("kl", "reward_model_accuracy", "seconds"),
        *("reference_fingerprint", "reference_verified"),
    }
    assert summary["reference_verified"] is True
    assert summary["kl_reference"] == pytest.approx(0, abs=1e-4)
    assert summary["kl"] == summary["kl_policy"] != 0
    assert summary["drift_relative"] > 0
    # Of PPO's three rows; the other stages have no judge.
    assert "3 values of the judge cannot show a fall" in summary["verdict"]["why"]
    assert {path.name for path in (out / "plots").iterdir()} >= {
        *("reward.png", "kl.png", "entropy.png", "losses.png", "length.png"),
    }


@pytest.mark.slow
def test_every_stage_leaves_its_rows(toy):
    out, _ = toy
    rows = metrics.read(out / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == [
        *(("sft", step) for step in range(6)),
        *(("reward_model", step) for step in range(3)),
        *(("ppo", step) for step in range(3)),
    ]
    first = rows[9]
    assert first["policy/sampler_mismatch"] < 1e-4
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert first["objective/kl_coef"] == pytest.approx(quickstart.Config.kl_coef)
    samples = metrics.read(out / "samples.jsonl")
    assert len(samples) == 3 * quickstart.SHOWN
    assert samples[0]["prompt"].startswith("review : the ")
    for row in samples:
        assert "".join(row["tokens"]) == row["response"]
        prompt, response = row["prompt"].split(), row["response"].split()
        assert row["judge"] == reviews.careful_gold(prompt, response)
    for row in samples[: quickstart.SHOWN]:  # before any update
        assert row["reference"] == row["response"]
        assert row["ref_logprobs"] == pytest.approx(row["logprobs"], abs=1e-3)
    assert samples[-1]["logprobs"] != samples[-1]["ref_logprobs"]
    assert all(-6 < row["judge/score"] < 2 for row in rows[9:])


@pytest.mark.long
def test_equal_seeds_are_equal_files_and_other_seeds_are_not(toy, tmp_path):
    out, _ = toy
    play(tmp_path / "same")
    assert outcome(tmp_path / "same") == outcome(out)
    play(tmp_path / "other", "--seed", "1")
    ours, theirs = outcome(out), outcome(tmp_path / "other")
    assert all(ours[name] != theirs[name] for name in ours)


@pytest.mark.long
def test_killed_at_random_steps_it_goes_on_to_the_last_bit(toy, tmp_path):
    """Every stage is killed once by SIGKILL and resumed."""
    out, _ = toy
    random = np.random.default_rng(0)
    parts = tmp_path / "parts"
    command = [sys.executable, str(SCRIPT), "--out", str(parts), *TOY, "--resume"]
    root = os.fspath(SCRIPT.parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    for rows in (int(random.integers(2, 6)), 7, int(random.integers(10, 12))):
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None and number_of_rows(parts) < rows:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command, env=environment, check=True)
    assert outcome(parts) == outcome(out)


def number_of_rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def outcome(folder: Path) -> dict[str, bytes]:
    """Metrics, samples and every array of the last PPO snapshot, as bytes."""
    files = {
        name: (folder / name).read_bytes()
        for name in ("metrics.jsonl", "samples.jsonl")
    }
    arrays = ocp.StandardCheckpointer().restore(
        (folder / "snapshots" / "ppo" / "3" / "arrays").absolute()
    )
    files["ppo"] = b"".join(
        path.encode() + np.asarray(leaf).tobytes()
        for path, leaf in sorted(arrays.items())
    )
    return files
