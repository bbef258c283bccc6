"""--help of each trainer fits one screen, and --help-all lists every option."""

import dataclasses
import typing

import pytest

from rlhf_jax.runs.command_line import help_screen
from rlhf_jax.train import evaluate, main
from rlhf_jax.train.methods import distill, grpo, nash_md, online_dpo, ppo, reinforce
from rlhf_jax.train.supervised import dpo, reward_model, sft

TRAINERS = {
    "sft": sft,
    "reward-model": reward_model,
    "ppo": ppo,
    "grpo": grpo,
    "reinforce": reinforce,
    "dpo": dpo,
    "distill": distill,
    "online-dpo": online_dpo,
    "nash-md": nash_md,
}
COMMANDS = TRAINERS | {"evaluate": evaluate}  # with a screen of options


def screen_of(name, option, *, capsys, monkeypatch, columns=90):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as exit_:
        main.main([name, option])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def fields(config):
    """The fields of a config, with the fields of required groups in their place."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            if field.default is dataclasses.MISSING:
                yield from fields(hints[field.name])
        else:
            yield field


def test_every_trainer_is_here():
    assert set(main.TRAINERS) == set(TRAINERS)


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_with_all_that_is_required(name, capsys, monkeypatch):
    shown = screen_of(name, "--help", capsys=capsys, monkeypatch=monkeypatch)
    assert len(shown.splitlines()) <= 42
    assert max(map(len, shown.splitlines())) <= 90
    assert f"usage: rlhf-jax {name} " in shown
    assert f"\n    rlhf-jax {name} --" in shown  # how it is called
    usage = shown.partition("\n\n")[0]
    for field in fields(COMMANDS[name].Config):
        defaults = (field.default, field.default_factory)
        required = defaults == (dataclasses.MISSING, dataclasses.MISSING)
        option = f"--{field.name.replace('_', '-')} "
        assert (option in usage) == required, field.name
    assert "--help-all" in shown


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_has_every_option(name, capsys, monkeypatch):
    shown = screen_of(name, "--help-all", capsys=capsys, monkeypatch=monkeypatch)
    config = COMMANDS[name].Config
    texts, hints = help_screen.documented(config), typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        assert texts[field.name]
        if not dataclasses.is_dataclass(hints[field.name]):  # a group has no option
            assert f"--{field.name.replace('_', '-')}" in shown


def test_the_command_alone_lists_all_commands_on_one_screen(capsys):
    main.main([])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    for name in main.COMMANDS:
        assert f"  {name} " in shown
