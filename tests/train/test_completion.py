"""Shell completion of commands, options and choices."""

import shutil
import subprocess

import pytest

from rlhf_jax.train import main

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
_tyro_rlhf_jax; printf '%s\\n' "${COMPREPLY[@]}"
"""


# As a completion widget calls it, with what it offers printed.
ZSH = """
compdef() { completer=$1; [[ $2 = rlhf-jax ]] }
_describe() { print -rl -- "${(P@)2}" }
source "$1"; shift
words=("$@"); CURRENT=$#
$completer | while read -r line; do print -r -- "${line%%:*}"; done
"""
FISH = """
source $argv[1]
complete --do-complete "$argv[2..]" | string replace --regex '\\t.*' ''
"""
COMPLETED = [
    (["on"], ["online-dpo"]),
    (["re"], ["reinforce", "report", "reward-model"]),
    (["ppo", "--kl"], ["--kl-coef", "--kl-control"]),  # and no word of their help
    (["ppo", "--group-s"], []),
    (["grpo", "--group-s"], ["--group-size"]),
    (["sft", "--dtype", "b"], ["bfloat16"]),
    (["ve"], ["verify"]),
]


@pytest.fixture(scope="module", params=("bash", "zsh", "fish"))
def shell(request, tmp_path_factory):
    """(shell, its completion script)."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    path = tmp_path_factory.mktemp("completion") / "script"
    main.main(["--tyro-write-completion", request.param, str(path)])
    return request.param, path


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(("words", "completed"), COMPLETED)
def test_a_shell_completes(shell, words, completed):
    name, script = shell
    command = {
        "bash": ("bash", "-c", BASH, "bash"),
        "zsh": ("zsh", "-fc", ZSH, "zsh"),
        "fish": ("fish", "--no-config", "-c", FISH),
    }[name]
    done = subprocess.run(
        [*command, script, "rlhf-jax", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    offered = done.stdout.splitlines()  # fish offers what is close, too
    assert [word for word in offered if word.startswith(words[-1])] == completed
    assert done.stderr == ""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "rlhf-jax.bash"
    main.main(["--tyro-write-completion", "bash", str(path)])
    return path


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
