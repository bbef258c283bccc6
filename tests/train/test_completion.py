"""Completion for shells: bash completes commands, options and choices."""

import shutil
import subprocess

import pytest

from rlhf_jax.train import main

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
_tyro_rlhf_jax; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "rlhf-jax.bash"
    main.main(["--tyro-write-completion", "bash", str(path)])
    return path


@pytest.mark.cases(quick=1)
@pytest.mark.skipif(shutil.which("bash") is None, reason="the shell")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["on"], ["online-dpo"]),
        (["re"], ["reinforce", "report", "reward-model"]),
        (["ppo", "--kl"], ["--kl-coef", "--kl-control"]),  # and no word of their help
        (["ppo", "--group-s"], [""]),
        (["grpo", "--group-s"], ["--group-size"]),
        (["sft", "--dtype", "b"], ["bfloat16"]),
        (["ve"], ["verify"]),
    ],
)
def test_bash_completes(script, words, completed):
    command = ["bash", "-c", ASK, "bash", script, "rlhf-jax", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == completed


def test_every_command_is_completed(script):
    (spec,) = (
        line for line in script.read_text().splitlines() if line.startswith("COMPL")
    )
    for name in main.COMMANDS:
        assert f"'{name}': {{'description'" in spec


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["csh", "x"], "expected --tyro-write-completion bash|zsh|fish FILE, got --ty"),
        (["bash"], "got --tyro-write-completion bash; write these three words"),
        (["bash", "no/x"], "to write the file no/x, got No such file or directory; na"),
    ],
)
def test_what_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main(["--tyro-write-completion", *words])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
