"""--verifier: by name or as the user's function, and runs recorded before it."""

import json
import sys

import pytest
import toy_files
from test_trainers import play, refused

import rlhf_jax.train.grpo
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, folder, metrics
from rlhf_jax.train.grpo.verifier import make_verifier

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEEDED = ("--out=x", "--model=m", "--data=d", "--held-out=h")


def parse(*argv):
    return command_line.parse(
        rlhf_jax.train.grpo.Config, description="", argv=[*NEEDED, *argv]
    )


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A working directory with a verifier in it."""
    (tmp_path / "own_verifiers.py").write_text(
        "def has_dog(prompt, response, row):\n"
        "    return float('dog' in response) * row['worth']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("argv", "response", "answer", "score"),
    [
        ((), "so #### 1,000.", "#### 1000", 1),
        ((), "so 1000", "#### 1000", 0),
        (("--unmarked=last_number",), "so 1000", "#### 1000", 1),
        (("--verifier=gsm8k",), "#### 2", "#### 3", 0),
        (("--verifier=integer",), "it is 12.0", 12, 1),
        (("--verifier=integer",), "it is 13", 12, 0),
        (("--verifier=exact",), " two  dogs ", "two dogs", 1),
        (("--verifier=exact",), "two", "two dogs", 0),
    ],
)
def test_a_verifier_by_name(argv, response, answer, score):
    for field in ("answer", "right"):
        verifier = make_verifier(parse(*argv, f"--answer-field={field}"))
        assert verifier("what?", response, {field: answer}) == score


def test_a_verifier_of_the_users(own_module):
    verifier = make_verifier(parse("--verifier=own_verifiers:has_dog"))
    assert verifier("what?", "a dog", {"worth": 3}) == 3
    assert verifier("what?", "a cat", {"worth": 3}) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--verifier=gsm",), "--verifier: expected gsm8k, integer, exact or module:f"),
        (("--verifier=no_such:f",), "ModuleNotFoundError"),
        (
            ("--verifier=exact", "--unmarked=last_number"),
            "--unmarked: expected none with --verifier exact, which does not read it",
        ),
        (
            ("--verifier=own_verifiers:has_dog", "--answer-field=right"),
            "--answer-field: expected none with --verifier own_verifiers:has_dog",
        ),
    ],
)
def test_what_is_refused(own_module, argv, message):
    with pytest.raises(InputError, match=message):
        make_verifier(parse(*argv))


@pytest.fixture
def files(own_module):
    toy_files.checkpoint(own_module / "model")
    rows = [{"question": "the cat", "worth": 2}, {"question": "a dog was", "worth": 1}]
    toy_files.jsonl(own_module / "rows.jsonl", *rows)
    return [
        *("--model", own_module / "model", "--data", own_module / "rows.jsonl"),
        *("--held-out", own_module / "rows.jsonl", "--batch-size=8"),
        *("--group-size=4", "--max-new-tokens=6", "--num-workers=1", "--num-steps=1"),
    ]


@pytest.mark.slow
def test_a_run_scores_with_it(files, tmp_path):
    out = tmp_path / "run"
    argv = (*files, "--verifier=own_verifiers:has_dog")
    play(rlhf_jax.train.grpo, out, *argv)
    worth = {"the cat": 2, "a dog was": 1}
    samples = metrics.read(out / "samples.jsonl")
    assert samples
    for row in samples:
        expected = worth[row["question"]] if "dog" in row["answer"] else 0
        assert row["score"] == expected
    [step] = metrics.read(out / "metrics.jsonl")
    assert step["reward/failed"] == 0


def test_a_row_that_the_verifier_cannot_read_is_named(files, tmp_path, capsys):
    for argv, field in ((("--verifier=exact",), "answer"), ((), "answer")):
        run = lambda out, argv=argv: play(  # noqa: E731
            rlhf_jax.train.grpo, out, *files, *argv
        )
        message = refused(capsys, tmp_path, run)
        assert f"rows.jsonl:1: expected a field {field!r}, got 'question'" in message


@pytest.mark.slow
def test_a_verifier_that_scores_nothing_is_told_before_anything_is_written(
    files, tmp_path, capsys, own_module
):
    """As one that takes lists does, such as a reward of `rlhf-jax ppo`."""
    (own_module / "list_verifiers.py").write_text(
        "def of_lists(prompts, responses, rows):\n    return [1.0] * len(responses)\n"
    )
    out = tmp_path / "run"
    argv = ("--verifier=list_verifiers:of_lists", "--out", out, "--no-progress")
    with pytest.raises(SystemExit) as stop:
        play(rlhf_jax.train.grpo, out, *files, *argv)
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "got none for 8 of 8 (the warning above says why)" in message
    assert "which is not a number for prompt" in message
    assert not out.exists()


def test_a_run_recorded_without_the_option_goes_on(tmp_path):
    """And only with the verifier that it had."""
    argv = (*NEEDED[1:], f"--out={tmp_path / 'run'}")
    config = command_line.parse(rlhf_jax.train.grpo.Config, description="", argv=argv)
    recorded = folder.open_run(config) / "config.json"
    content = json.loads(recorded.read_text())
    assert content["config"].pop("verifier") == "gsm8k"
    recorded.write_text(json.dumps(content))
    resumed = command_line.parse(
        rlhf_jax.train.grpo.Config,
        description="",
        argv=["--config", str(recorded), "--resume"],
    )
    assert resumed.verifier == "gsm8k"
    folder.check_run(resumed)
    other = command_line.parse(
        rlhf_jax.train.grpo.Config,
        description="",
        argv=["--config", str(recorded), "--resume", "--verifier=exact"],
    )
    with pytest.raises(InputError, match='verifier: recorded "gsm8k", given "exact"'):
        folder.check_run(other)
