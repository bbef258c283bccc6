"""--verifier: by name or a user's function, and runs recorded before the option."""

import sys

import pytest
import toy_files
from test_trainers import play, refused

import rlhf_jax.train.methods.grpo
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.train.config.rewards import Verifier
from rlhf_jax.train.rewards import make_verifier
from rlhf_jax.train.rollouts.environment import make_environment
from rlhf_jax.verification.code import trial
from rlhf_jax.verification.isolation import processes

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEEDED = ("--out=x", "--model=m", "--prompts=d", "--held-out=h")


def parse(*argv):
    return command_line.parse(
        rlhf_jax.train.methods.grpo.Config, description="", argv=[*NEEDED, *argv]
    )


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A working directory that contains a verifier."""
    (tmp_path / "own_verifiers.py").write_text(
        "def has_dog(prompt, response, row):\n"
        "    return float('dog' in response) * row['worth']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("argv", "response", "answer", "score"),
    [
        ("gsm8k", "so #### 1,000.", "#### 1000", 1),
        ("gsm8k", "so 1000", "#### 1000", 0),
        ("gsm8k,unmarked=last_number", "so 1000", "#### 1000", 1),
        ("gsm8k", "#### 2", "#### 3", 0),
        ("integer", "it is 12.0", 12, 1),
        ("integer", "it is 13", 12, 0),
        ("exact", " two  dogs ", "two dogs", 1),
        ("exact", "two", "two dogs", 0),
    ],
)
def test_a_verifier_by_name(argv, response, answer, score):
    for field in ("answer", "right"):
        choice = parse(f"--verifier={argv},answer_field={field}").rewards.verifier
        verifier = make_verifier(choice)
        assert verifier("what?", response, {field: answer}) == score


def test_a_verifier_of_the_users(own_module):
    verifier = make_verifier(Verifier("own_verifiers:has_dog"))
    assert verifier("what?", "a dog", {"worth": 3}) == 3
    assert verifier("what?", "a cat", {"worth": 3}) == 0


def test_a_class_is_no_verifier():
    name = "rlhf_jax.verification.code.verifier:PythonTests"
    with pytest.raises(InputError, match="got the class PythonTests; name an object"):
        make_verifier(Verifier(name))


def test_generated_code_runs_where_something_sets_it_apart(own_module, monkeypatch):
    """Or where --unsafe-verifier permits it; for verifiers and environments."""
    (own_module / "own_code.py").write_text(
        "from rlhf_jax.verification.code.verifier import PythonTests\n"
        "verify = PythonTests(seconds=3)\n"
    )
    choice = Verifier("own_code:verify")
    none = processes.Isolation("none", "no program bwrap")
    monkeypatch.setattr(trial, "isolation", lambda: none)
    options = parse("--verifier=own_code:verify").rewards
    assert options.unsafe_verifier is False
    with pytest.raises(InputError, match=r"none .no program bwrap.*--unsafe-verifier"):
        make_verifier(choice, unsafe=options.unsafe_verifier)
    with pytest.raises(InputError, match=r"none .no program bwrap.*--unsafe-verifier"):
        make_environment("programming")
    options = parse("--verifier=own_code:verify", "--unsafe-verifier").rewards
    assert "unsafe_verifier" not in options.of_pool
    made = make_verifier(choice, unsafe=options.unsafe_verifier)
    assert (made.seconds, made.unsafe) == (3, True)
    assert make_environment("programming", unsafe=True).tests.unsafe
    monkeypatch.setattr(trial, "isolation", lambda: processes.Isolation("landlock", ""))
    assert make_verifier(choice).unsafe is False
    assert make_environment("programming").tests.unsafe is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "gsm"},
            "--verifier: expected one of 'gsm8k', 'integer', 'exact', 'mo",
        ),
        ({"name": "no_such:f"}, "ModuleNotFoundError"),
        (
            {"name": "exact", "unmarked": "last_number"},
            "unmarked=last_number cannot be combined with --verifier exact, because "
            "gsm8k alone",
        ),
        (
            {"name": "own_verifiers:has_dog", "answer_field": "right"},
            "answer_field= cannot be combined with --verifier own_verifiers:has_dog",
        ),
    ],
)
def test_what_is_refused(own_module, fields, message):
    with pytest.raises(InputError, match=message):
        make_verifier(Verifier(**fields))


@pytest.fixture
def files(own_module):
    toy_files.checkpoint(own_module / "model")
    rows = [{"question": "the cat", "worth": 2}, {"question": "a dog was", "worth": 1}]
    toy_files.jsonl(own_module / "rows.jsonl", *rows)
    return [
        *("--model", own_module / "model", "--prompts", own_module / "rows.jsonl"),
        "--prompt-field=question",
        *("--held-out", own_module / "rows.jsonl", "--batch-size=8"),
        *("--group-size=4", "--max-new-tokens=6", "--num-workers=1", "--num-steps=1"),
    ]


@pytest.mark.slow
def test_a_run_scores_with_it(files, tmp_path):
    out = tmp_path / "run"
    argv = (*files, "--verifier=own_verifiers:has_dog")
    play(rlhf_jax.train.methods.grpo, out, *argv)
    worth = {"the cat": 2, "a dog was": 1}
    samples = metrics.read(out / "samples.jsonl")
    assert samples
    for row in samples:
        expected = worth[row["prompt"]] if "dog" in row["response"] else 0
        assert row["score"] == expected
    [step] = metrics.read(out / "metrics.jsonl")
    assert step["reward/failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("listed", [False, True])
def test_a_run_logs_what_the_verifier_of_code_counts(files, own_module, listed):
    """Its responses contain no blocks of code; as a whole they are not valid Python."""
    (own_module / "own_code.py").write_text(
        "from rlhf_jax.verification.code.verifier import PythonTests\n"
        "verify = PythonTests(seconds=3, extract='whole')\n"
    )
    rows = [{"question": "the cat", "tests": "assert f(1) == 1"}] * 2
    toy_files.jsonl(own_module / "rows.jsonl", *rows)
    chosen = ("--rewards", "code=verifier:own_code:verify", "short=length")
    argv = chosen if listed else ("--verifier=own_code:verify",)
    argv += ("--held-out-every=1",)
    out = own_module / "run"
    play(rlhf_jax.train.methods.grpo, out, *files, "--unsafe-verifier", *argv)
    [step] = metrics.read(out / "metrics.jsonl")
    stem = "reward/code/" if listed else "reward/"
    for name in ("failed", "timed_out", "refused", "code_timed_out", "suspicious"):
        assert step[f"{stem}{name}"] == step[f"eval/greedy_{stem}{name}"] == 0


@pytest.mark.slow
def test_a_row_that_the_verifier_cannot_read_is_named(files, tmp_path, capsys):
    for verifier in ("exact", "gsm8k"):
        run = lambda out, name=verifier: play(  # noqa: E731
            rlhf_jax.train.methods.grpo, out, *files, f"--verifier={name}"
        )
        message = refused(capsys, tmp_path, run)
        assert "rows.jsonl:1: expected a field 'answer', got 'question'" in message


@pytest.mark.slow
def test_a_verifier_that_scores_nothing_is_told_before_anything_is_written(
    files, tmp_path, capsys, own_module
):
    """Such as a function of lists, like a reward of `rlhf-jax ppo`."""
    (own_module / "list_verifiers.py").write_text(
        "def of_lists(prompts, responses, rows):\n    return [1.0] * len(responses)\n"
    )
    out = tmp_path / "run"
    argv = ("--verifier=list_verifiers:of_lists", "--out", out, "--no-progress")
    with pytest.raises(SystemExit) as stop:
        play(rlhf_jax.train.methods.grpo, out, *files, *argv)
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "got none for 8 of 8 (the warning above says why)" in message
    assert "expected a finite number as the score" in message
    assert not out.exists()
