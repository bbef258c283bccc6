"""The command that runs all certificates, with stand-ins for their commands."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from certificates import every

from rlhf_jax.functional.checks import InputError


@pytest.fixture
def commands(monkeypatch):
    """Lists the commands; each writes a summary unless it is certify_family."""
    ran = []

    def run(command, **_):
        ran.append(command)
        name = command[2].removeprefix("certificates.")
        folder = every.Path(command[command.index("--out") + 1])
        folder.mkdir(exist_ok=True)
        if name == "certify_family":
            return SimpleNamespace(returncode=7)
        failed = ["an optimum"] if name == "certify_ratios" else []
        summary = {"certificates": 3, "failed": failed, "seconds": 2.0}
        (folder / "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(returncode=len(failed))

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_every_command_is_run_once_and_what_fails_is_told(commands, tmp_path, capsys):
    options = every.Config(out=tmp_path / "out", num_worlds=2, seed=5)
    assert every.main(options) == 2
    assert [command[2] for command in sorted(commands)] == [
        f"certificates.{name}" for name in sorted(every.NAMES)
    ]
    assert all(
        command[5:] == ["--seed", "5", "--num-worlds", "2"] for command in commands
    )
    lines = capsys.readouterr().out.splitlines()
    assert "certify_family: ended with status 7; see its log" in lines
    assert "certify_ratios: 2 of 3 hold, 2 s; not an optimum" in lines
    assert "certify_distill: 3 of 3 hold, 2 s" in lines
    assert lines[-2].startswith("20 of 21 certificates hold")
    assert lines[-1] == "not counted: certify_family, which ended otherwise"
    # What is done is read again, and what was stopped goes on.
    del commands[:]
    assert every.main(options) == 2
    (again,) = commands
    assert (again[2], again[-1]) == ("certificates.certify_family", "--resume")


def test_a_run_of_other_worlds_is_not_read(commands, tmp_path):
    folder = tmp_path / "certify"
    folder.mkdir()
    recorded = {"config": {"seed": 0, "num_worlds": 3}, "versions": {}}
    (folder / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(InputError, match="--num-worlds: expected 3, with which"):
        every.main(every.Config(out=tmp_path, only=("certify",)))
    assert commands == []


def test_commands_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match=r"--only: expected some of certify, .* got x"):
        every.Config(out=tmp_path, only=("x",))
    with pytest.raises(InputError, match="jobs: expected"):
        every.Config(out=tmp_path, jobs=0)


def test_every_file_of_certificates_is_in_the_list():
    files = every.EXPERIMENTS.glob("certificates/certify*.py")
    assert {file.stem for file in files} == set(every.NAMES)
