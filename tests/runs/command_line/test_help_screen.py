"""--help on one screen: options, texts and defaults."""

import dataclasses
import re
import textwrap
from typing import Annotated, Literal

import pytest
import tyro

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, run_config
from rlhf_jax.runs.command_line import help_screen


@dataclasses.dataclass(frozen=True)
class Group:
    rank: int = 8
    """Rank of the adapters."""


@dataclasses.dataclass(frozen=True)
class Unnamed:
    lam: float | None = 0.95
    """λ of GAE."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    model: str
    """Model to start from,
    a folder."""
    tokenizer: str | None = None
    """Tokenizer; None takes that of --model."""
    buckets: tuple[int, ...] | None = (8, 16)
    """Widths of a batch."""
    style: Literal["standard", "tf"] = "standard"
    """Form of Adam."""
    chat: bool = False
    """Whether prompts are messages."""
    hidden: int = 3
    """Number that nobody asks for at first."""
    lora: Group = Group()
    """Adapters."""
    ppo: Annotated[Unnamed, tyro.conf.arg(name="")] = Unnamed()
    """Choices of PPO."""


SCREEN = {
    "Start": ("model", "tokenizer", "buckets", "style", "chat"),
    "Training": ("lora.rank", "ppo.lam"),
    "Run": ("out", "seed"),
}
DESCRIPTION = "Trains.\n\n    train --model m\n\nAnd much else."


def text(*argv, monkeypatch, capsys, columns=100, presets=None):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as exit_:
        command_line.parse(
            Config,
            description=DESCRIPTION,
            presets=presets,
            screen=SCREEN,
            prog="train",
            argv=argv,
        )
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_options_of_the_screen_and_no_other(option, monkeypatch, capsys):
    shown = text(option, monkeypatch=monkeypatch, capsys=capsys)
    head, what, example, listed, notes = shown.split("\n\n")
    assert head == "usage: train --model TEXT --out PATH [OPTIONS]"
    assert (what, example) == ("Trains.", "    train --model m")
    assert "And much else" not in shown
    assert "--hidden" not in shown
    assert listed.splitlines() == [
        "Start:",
        f"{'  --model TEXT':28}Model to start from, a folder.",
        f"{'  --tokenizer TEXT':28}Tokenizer; None takes that of --model.",
        f"{'  --buckets INT ...':28}Widths of a batch. [(8, 16)]",
        f"{'  --style standard|tf':28}Form of Adam. [standard]",
        f"{'  --chat':28}Whether prompts are messages.",
        "Training:",
        f"{'  --lora.rank INT':28}Rank of the adapters. [8]",
        f"{'  --lam FLOAT':28}λ of GAE. [0.95]",
        "Run:",
        *textwrap.wrap(
            help_screen.documented(Config)["out"],
            100,
            initial_indent=f"{'  --out PATH':28}",
            subsequent_indent=28 * " ",
        ),
        f"{'  --seed INT':28}Seed of every random number. [0]",
    ]
    assert "--help-all lists every option;" in " ".join(notes.split())


def test_help_all_lists_every_option(monkeypatch, capsys):
    shown = text("--help-all", monkeypatch=monkeypatch, capsys=capsys)
    for field in ("--model", "--hidden", "--lam", "--lora.rank", "--keep-snapshots"):
        assert field in shown
    assert "And much else" in shown
    assert "Model to start from, a folder." in shown  # two lines of the source


@pytest.mark.parametrize("wrong", ["--hiden=1", "--hidden=x"])
@pytest.mark.parametrize(
    ("screen", "help_option"), [(SCREEN, "--help-all"), (None, "--help")]
)
def test_an_error_names_the_help_with_every_option(wrong, screen, help_option, capsys):
    with pytest.raises(InputError) as error:
        command_line.parse(
            Config,
            description=DESCRIPTION,
            screen=screen,
            prog="train",
            argv=["--model=m", "--out=run", wrong],
        )
    message = str(error.value)
    assert re.findall(r"train (--help\S*)", message) == [help_option]
    assert wrong.partition("=")[0] in message
    assert capsys.readouterr() == ("", "")


def test_no_line_is_wider_than_the_terminal(monkeypatch, capsys):
    shown = text("--help", monkeypatch=monkeypatch, capsys=capsys, columns=60)
    assert max(map(len, shown.splitlines())) <= 60


def test_a_preset_shows_its_defaults(monkeypatch, capsys):
    presets = {"tiny": {"lora": Group(rank=2), "style": "tf"}}
    argv = ("--preset", "tiny", "--help")
    shown = text(*argv, monkeypatch=monkeypatch, capsys=capsys, presets=presets)
    assert "Rank of the adapters. [2]" in shown
    assert "Form of Adam. [tf]" in shown
    assert "--preset NAME starts from a published recipe: tiny." in shown


def test_an_option_without_a_default_is_required():
    rank = help_screen.option(Config, "lora.rank")
    assert (rank.default, rank.required) == (Group().rank, False)
    assert help_screen.option(Config, "model").required


def test_an_unknown_field_is_a_key_error():
    with pytest.raises(KeyError, match="modle"):
        help_screen.option(Config, "modle")
