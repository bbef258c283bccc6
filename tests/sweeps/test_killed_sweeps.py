"""Twelve runs of a real trainer, killed at random, equal those of an unbroken sweep."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import places
import pytest
import toy_files

from rlhf_jax.functional.checks import StopError
from rlhf_jax.train import sweep

TOML = """
trainer = "sft"
seeds = [0, 1]

[options]
model = "MODEL"
data = "DATA"
num_steps = 6
batch_size = 4
snapshot_every = 1
max_length = 12

[grid]
learning_rate = [1e-3, 1e-2, 1e-1]
optimizer = ["adamw,weight_decay=0.0", "adamw,weight_decay=0.1"]

[measures]
loss = "loss/language_model"

[claims]
"more learning is less loss" = "loss(learning_rate=0.01) < loss(learning_rate=0.001)"
"""


@pytest.fixture
def file(tmp_path):
    toy_files.checkpoint(tmp_path / "model")
    words = toy_files.WORDS
    toy_files.jsonl(
        tmp_path / "data.jsonl",
        *(
            {"prompt": " ".join(words[n : n + 2]), "response": words[n + 3]}
            for n in range(16)
        ),
    )
    text = TOML.replace("MODEL", str(tmp_path / "model"))
    path = tmp_path / "sweep.toml"
    path.write_text(text.replace("DATA", str(tmp_path / "data.jsonl")))
    return path


def command(file, out):
    words = [sys.executable, "-m", "rlhf_jax.train.main", "sweep", str(file)]
    return [*words, "--out", str(out), "--jobs=2"]


def figures(out):
    """The runs' files, which must be equal to the byte except for times and logs."""
    names = ("metrics.jsonl", "samples.jsonl")
    results = json.loads((out / "results.json").read_text())
    del results["proof"]  # with the sums of logs
    return (
        {"results.json": results}
        | {
            str(path.relative_to(out)): path.read_bytes()
            for path in sorted(out.rglob("*.json*"))
            if path.name in names
        }
        | {
            str(path.relative_to(out)): path.read_bytes()
            for path in sorted(out.rglob("model.safetensors"))
        }
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_sweep_killed_at_random_equals_a_whole_one(file, tmp_path):
    environment = {**os.environ, "PYTHONPATH": places.PYTHONPATH}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    subprocess.run(command(file, whole), env=environment, check=True)
    lasts = time.monotonic() - began
    kinds = random.Random(0)
    for kind in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(command(file, killed), env=environment)
        time.sleep(lasts * kinds.uniform(0.2, 0.5))
        process.send_signal(kind)
        assert process.wait() != 0, "killed too late to tell anything"
    subprocess.run(command(file, killed), env=environment, check=True)
    assert len(figures(whole)) == 1 + 12 * 3
    assert figures(killed) == figures(whole)


@pytest.mark.long
@pytest.mark.slow
def test_a_cell_that_fails_is_told_and_the_others_are_complete(file, tmp_path):
    """No example fits into rows of one token, so the trainer fails at its start."""
    text = file.read_text().replace("max_length = 12\n", "")
    text = re.sub("^optimizer = .*$", "max_length = [12, 1]", text, flags=re.MULTILINE)
    file.write_text(text.replace("[1e-3, 1e-2, 1e-1]", "[1e-3, 1e-2]"))
    out = tmp_path / "out"
    with pytest.raises(StopError, match=r"4 of 8 runs failed, the others are complet"):
        sweep.main(sweep.Config(file=file, out=out, jobs=2))
    done = {path.parent.parent.name for path in out.rglob("summary.json")}
    assert done == {
        "learning_rate=0.001,max_length=12",
        "learning_rate=0.01,max_length=12",
    }
