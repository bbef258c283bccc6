"""Every command line in a README, experiment or sweep parses."""

import re
import runpy
import shlex
import sys
import tomllib

import places
import pytest
import tyro

from rlhf_jax.sweeps import declaration, planned
from rlhf_jax.train import main as commands

DOCUMENTS = (
    places.ROOT / "README.md",
    *sorted(
        file
        for suffix in ("md", "py", "toml")
        for file in places.EXPERIMENTS.rglob(f"*.{suffix}")
    ),
)
COMMAND = re.compile(r"^[\s#]*((?:rlhf-jax|python experiments)[ /][^`\n]*--?\w.*)$")
# Behind what stands in prose for something else.
LEFT_OUT = ("...", "<")


def commands_of(text: str) -> list[str]:
    """Commands with options in code blocks, docstrings, comments and inline code."""
    text = re.sub(r"\\+\n[\s#]*", "", text)
    lines = [
        match[1] for line in text.splitlines() if (match := COMMAND.fullmatch(line))
    ]
    lines += re.findall(
        r"`((?:rlhf-jax|python experiments)[ /][^`\n]*--out [^`\n]+)`", text
    )
    return [line for line in lines if not any(mark in line for mark in LEFT_OUT)]


COMMANDS = sorted(
    {
        command
        for file in DOCUMENTS
        for command in commands_of(file.read_text(encoding="utf-8"))
    }
)
SWEEPS = [
    *(
        file
        for file in sorted(places.EXPERIMENTS.rglob("*.toml"))
        if "question" in tomllib.loads(file.read_text(encoding="utf-8"))
    ),
    *(
        file
        for file in sorted(places.EXPERIMENTS.rglob("*.py"))
        if re.search(r"^question = ", file.read_text(encoding="utf-8"), re.MULTILINE)
    ),
]


class ParsedError(Exception):
    """Raised once a command line is parsed, instead of running it."""


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line as its program does, without running it."""
    monkeypatch.chdir(places.ROOT)
    monkeypatch.syspath_prepend(places.EXPERIMENTS)
    cli = tyro.cli

    def parsed(*args, **kwargs):
        cli(*args, **kwargs)
        raise ParsedError

    monkeypatch.setattr(tyro, "cli", parsed)

    def start(words):
        if words[0] == "rlhf-jax":
            commands.main(words[1:])
        elif words[1] == "experiments":
            monkeypatch.setattr("sys.argv", list(words[2:]))
            monkeypatch.delitem(sys.modules, words[2], raising=False)
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            monkeypatch.setattr("sys.argv", list(words[1:]))
            runpy.run_path(words[1], run_name="__main__")

    def parse(words):
        with pytest.raises(ParsedError):
            start(words)

    return parse


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_that_is_shown_parses(command, parse):
    words = shlex.split(command, comments=True)
    parse(words)
    if words[1] == "sweep":
        assert (places.ROOT / words[2]).is_file()


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_the_options_of_every_sweep_are_those_of_its_runs(file, parse, tmp_path):
    sweep = declaration.read(file)
    program = "python" if sweep.program else "rlhf-jax"
    for run in planned.runs_of(sweep, out=tmp_path):
        if run.seed == sweep.seeds[0]:
            parse((program, *run.program, *run.options))


def test_commands_are_found():
    text = (
        "```bash\nrlhf-jax ppo --model m \\\n    --out runs/a   # a comment\n```\n"
        "`python experiments studies.x --out runs/x`, rlhf-jax ppo and\n"
        "#     rlhf-jax sweep FILE --out runs/s\n    python experiments x ... --out a\n"
    )
    assert [shlex.split(line, comments=True) for line in commands_of(text)] == [
        ["rlhf-jax", "ppo", "--model", "m", "--out", "runs/a"],
        ["rlhf-jax", "sweep", "FILE", "--out", "runs/s"],
        ["python", "experiments", "studies.x", "--out", "runs/x"],
    ]
    assert len(COMMANDS) > 40
    assert len(SWEEPS) > 8
