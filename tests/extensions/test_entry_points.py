"""Extensions from other packages: found by name; broken packages are reported."""

import collections.abc
from types import ModuleType

import pytest
import toy_packages

from rlhf_jax.extensions import entry_points
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train import main

SOURCES = {
    "sound_part": "Config = 1\ndef command(argv):\n    print('ran', *argv)\n",
    "bare_part": "number = 3\n",
    "raising_part": "import no_such_module_of_anyone\n",
    "leaving_part": "import sys\nsys.exit(3)\n",
}
METHODS = {
    "sound": "sound_part",
    "raises": "raising_part",
    "leaves": "leaving_part",
    "bare": "bare_part",
    "number": "bare_part:number",
    "nameless": "bare_part:walk",
    "absent": "absent_part.inner",
    "ppo": "sound_part",
}


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    toy_packages.install(tmp_path, {"rlhf_jax.methods": METHODS}, SOURCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_names_are_those_of_the_group():
    assert {*METHODS} <= {*entry_points.names("methods")}
    assert "sound" not in entry_points.names("verifiers")


def test_a_part_is_loaded_by_its_name():
    part = entry_points.load("sound", group="methods", kind=ModuleType)
    assert part.__name__ == "sound_part"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raising_part to be imported, got ModuleNotFoundError: No module"),
        ("leaves", "expected leaving_part to be imported, got SystemExit: 3; mend tha"),
        ("number", "expected a module at bare_part:number, got 3; mend that package,"),
        ("bare", "with Config and command, got bare_part without Config and command;"),
        ("nameless", "got AttributeError: module 'bare_part' has no attribute 'walk'"),
        ("absent", "ModuleNotFoundError: No module named 'absent_part'; mend that pa"),
    ],
)
def test_a_broken_part_ends_its_command_in_one_line(name, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main([name])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: entry point {name!r}")
    assert message in printed
    assert printed.count("\n") == 1


def test_a_part_of_another_type_is_refused():
    with pytest.raises(InputError, match=r"expected a mapping at bare_part:number, go"):
        entry_points.load("number", group="methods", kind=collections.abc.Mapping)


def test_help_lists_them_all_and_says_which_are_broken(capsys):
    main.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "  sound          sound_part" in lines
    assert "  raises         raising_part" in lines  # nothing was imported
    absent = "absent_part.inner (cannot be imported: no module 'absent_part')"
    assert f"  absent         {absent}" in lines
    assert "  ppo            sound_part (hidden by our command)" in lines


def test_help_has_the_summary_of_a_package(installed, monkeypatch, capsys):
    project = (
        '[project]\nname = "yours"\nversion = "2"\ndescription = "PPO on signs."\n'
        '[project.entry-points."rlhf_jax.methods"]\n'
        'signs = "sound_part"\nlost = "absent_part"\n'
    )
    toy_packages.install(installed / "other", project, {})
    monkeypatch.syspath_prepend(str(installed / "other"))
    main.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "  signs          PPO on signs." in lines
    lost = "PPO on signs. (cannot be imported: no module 'absent_part')"
    assert f"  lost           {lost}" in lines


def test_a_command_has_its_options(capsys):
    main.main(["sound", "--a", "b"])
    assert capsys.readouterr().out == "ran --a b\n"


def test_two_packages_of_one_name_are_both_named(installed, monkeypatch):
    project = (
        '[project]\nname = "yours"\nversion = "2"\n'
        '[project.entry-points."rlhf_jax.methods"]\nsound = "sound_part"\n'
    )
    toy_packages.install(installed / "other", project, {})
    monkeypatch.syspath_prepend(str(installed / "other"))
    with pytest.raises(InputError, match=r"got mine and yours; uninstall all but one"):
        entry_points.load("sound", group="methods")
