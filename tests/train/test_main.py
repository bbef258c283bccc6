"""The console script: its commands and their exits."""

import importlib
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from places import FIXTURES, ROOT

import rlhf_jax
from rlhf_jax.functional.checks import StopError
from rlhf_jax.inspection import token_kl
from rlhf_jax.runs import command_line
from rlhf_jax.train import main


@pytest.mark.parametrize(
    ("module", "argv", "field", "value"),
    [
        (
            token_kl,
            ["kl", "--policy", "p", "--reference", "r", "--prompt", "the text"],
            "prompt",
            "the text",
        ),
    ],
)
def test_a_command_runs_with_its_options(monkeypatch, module, argv, field, value):
    configs = []
    monkeypatch.setattr(module, "run", configs.append)
    main.main(argv)
    (options,) = configs
    assert isinstance(options, module.Options)
    assert getattr(options, field) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["kl", "--policy", "p", "--reference", "r"], "error: expected one of --text"),
        (["verify"], "error: expected PATH, got none; rlhf-jax verify --help explains"),
        (["forget"], "got 'forget'; write one of them first"),
        (["grop"], "got 'grop'; did you mean grpo?"),
        (["--verify"], "got '--verify'; did you mean verify?"),
        (["evaluat", "--model=m"], "got 'evaluat'; did you mean evaluate?"),
    ],
)
def test_what_the_user_got_wrong_ends_with_status_2(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        main.main(argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_result_ends_with_status_1(capsys, monkeypatch):
    def stop(options):
        raise StopError("it must not go on")

    monkeypatch.setattr(token_kl, "run", stop)
    with pytest.raises(SystemExit) as exit_:
        main.main(["kl", "--policy=p", "--reference=r", "--prompt=t"])
    assert exit_.value.code == 1
    assert capsys.readouterr().err == "stopped: it must not go on\n"


def test_the_package_names_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["rlhf-jax"].partition(":")
    assert getattr(importlib.import_module(module), name) is main.main


@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"]])
def test_the_list_of_commands_loads_no_command_and_no_jax(argv):
    """The first screen that a user sees must appear at once."""
    code = (
        f"import sys; from rlhf_jax.train.main import main; main({argv}); "
        "print(sum(name.startswith('rlhf_jax') for name in sys.modules), "
        "'jax' in sys.modules, 'tyro' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules, *loaded = done.stderr.split()
    assert loaded == ["False", "False"]
    assert int(modules) <= 8
    if "--version" in argv:
        assert done.stdout == f"rlhf-jax {rlhf_jax.__version__}\n"
    else:
        assert all(f"  {name} " in done.stdout for name in main.COMMANDS)


def test_the_module_is_the_console_script():
    command = [sys.executable, "-m", "rlhf_jax"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"{main.usage()}\n"


@pytest.mark.parametrize(
    "script", ["bin/rlhf-jax", "rlhf_jax/__main__.py", "rlhf_jax/train/main.py"]
)
def test_how_a_run_goes_on_names_the_command(script, tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(sys, "argv", [script, "ppo"])
    monkeypatch.chdir(tmp_path)
    message = command_line.go_on(types.SimpleNamespace(out=Path()))
    command = f"cd {tmp_path} && rlhf-jax ppo --config ./config.json --resume"
    assert message == f"go on with\n  {command}"


def test_texts_name_commands_that_there_are():
    """Checks messages, docstrings and READMEs; the changelog may name removed ones."""
    named = {}
    for folder in (ROOT / "rlhf_jax", ROOT / "experiments"):
        for path in (*folder.rglob("*.py"), *folder.rglob("README.md")):
            for name in re.findall(r"`rlhf-jax ([a-z][a-z-]*)", path.read_text()):
                named.setdefault(name, path.name)
    assert len(named) > 10
    assert {name: named[name] for name in named.keys() - main.COMMANDS.keys()} == {}


@pytest.mark.slow
def test_help_ends_quietly_where_nobody_reads_on():
    command = f"{sys.executable} -m rlhf_jax.train.main ppo --help-all | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("usage: ")
    assert done.stderr.strip() == ""


@pytest.mark.slow
def test_nothing_is_said_of_pytorch():
    folder = FIXTURES / "gpt2"
    code = (
        "from rlhf_jax.data.tokenization import load_tokenizer; "
        f"load_tokenizer({str(folder)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert "PyTorch" not in done.stdout + done.stderr
