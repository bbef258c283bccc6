"""Rewards on the host are asked once about every response, though batches are filled.

Three prompts in batches of two: the last batch repeats a prompt.
"""

import sys

import pytest
import toy_files
from test_trainers import play

from rlhf_jax.train import evaluate
from rlhf_jax.train.methods import grpo

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
REWARDS = """
def note(row):
    if "log" in row:
        with open(row["log"], "a") as file:  # whole lines, from any process
            file.write(row["prompt"] + "\\n")

def score(prompts, responses, rows):
    for row in rows:
        note(row)
    return [0.5] * len(rows)

def verify(prompt, response, row):
    note(row)
    return 0.5
"""
ASKED = {
    "a function": ("--reward=noting:score",),
    "a verifier": ("--verifier=noting:verify", "--num-workers=2"),
}
PROMPTS = ("the cat", "a dog was", "we ran")
SAMPLES = 2


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "noting.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    toy_files.checkpoint(tmp_path / "model")
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    toy_files.jsonl(tmp_path / "prompts.jsonl", *rows)
    logged = [{**row, "log": str(tmp_path / "log")} for row in rows]
    toy_files.jsonl(tmp_path / "held_out.jsonl", *logged)
    yield tmp_path
    sys.modules.pop("noting", None)


def times_asked(files):
    """The number of questions about each prompt of the held-out file."""
    lines = (files / "log").read_text().splitlines()
    assert {*lines} <= {*PROMPTS}
    return [lines.count(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("asked", ASKED)
def test_an_evaluation_asks_once(files, asked):
    """About the greedy response and every sample."""
    play(
        evaluate,
        files / "run",
        *("--model=model", "--prompts=held_out.jsonl", "--max-new-tokens=4"),
        *("--batch-size=2", f"--num-samples={SAMPLES}", *ASKED[asked]),
    )
    assert times_asked(files) == [1 + SAMPLES] * 3


@pytest.mark.parametrize("asked", ASKED)
def test_held_out_rows_are_asked_about_once(files, asked):
    """Before the run and after it, about the greedy response and every sample."""
    summary = play(
        grpo,
        files / "run",
        *("--model=model", "--prompts=prompts.jsonl", "--held-out=held_out.jsonl"),
        *("--batch-size=2", "--group-size=2", "--max-new-tokens=4", "--num-steps=1"),
        *(f"--held-out-samples={SAMPLES}", *ASKED[asked]),
    )
    assert times_asked(files) == [2 * (1 + SAMPLES)] * 3
    assert summary is not None
    for name in ("held_out_score", "held_out_sampled_score"):
        assert summary[f"{name}_before"] == summary[f"{name}_after"] == 0.5
