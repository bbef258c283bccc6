"""Parts of other packages: found by name, and a broken package is said to be one."""

import collections.abc

import pytest
import toy_packages

from rlhf_jax.extensions import entry_points
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train import main

SOURCES = {
    "sound_part": "def run(argv):\n    print('ran', *argv)\nnumber = 3\n",
    "raising_part": "import no_such_module_of_anyone\n",
    "leaving_part": "import sys\nsys.exit(3)\n",
}
COMMANDS = {
    "sound": "sound_part:run",
    "raises": "raising_part:run",
    "leaves": "leaving_part:run",
    "number": "sound_part:number",
    "nameless": "sound_part:walk",
    "absent": "absent_part.inner:run",
    "ppo": "sound_part:run",
}


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    toy_packages.install(tmp_path, {"rlhf_jax.commands": COMMANDS}, SOURCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_names_are_those_of_the_group():
    assert {*COMMANDS} <= {*entry_points.names("commands")}
    assert "sound" not in entry_points.names("verifiers")


def test_a_part_is_loaded_by_its_name():
    assert entry_points.load("sound", group="commands").__module__ == "sound_part"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raising_part:run to be imported, got ModuleNotFoundError: No mod"),
        ("leaves", "expected leaving_part:run to be imported, got SystemExit: 3; mend"),
        ("number", "expected a callable at sound_part:number, got 3; mend that packa"),
        ("nameless", "got AttributeError: module 'sound_part' has no attribute 'walk'"),
        ("absent", "ModuleNotFoundError: No module named 'absent_part'; mend that pa"),
    ],
)
def test_a_broken_part_ends_its_command_in_one_line(name, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main.main([name])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: entry point {name!r} of mine: expected ")
    assert message in printed
    assert printed.count("\n") == 1


def test_a_part_of_another_type_is_refused():
    with pytest.raises(InputError, match=r"expected a mapping at sound_part:number, g"):
        entry_points.load("number", group="commands", kind=collections.abc.Mapping)


def test_help_lists_them_all_and_says_which_are_broken(capsys):
    main.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "  sound         sound_part:run" in lines
    assert "  raises        raising_part:run" in lines  # nothing was imported
    absent = "absent_part.inner:run (cannot be imported: no module 'absent_part')"
    assert f"  absent        {absent}" in lines
    assert "  ppo           sound_part:run (unread: ours has the name)" in lines


def test_a_command_has_its_options(capsys):
    main.main(["sound", "--a", "b"])
    assert capsys.readouterr().out == "ran --a b\n"


def test_two_packages_of_one_name_are_both_named(installed, monkeypatch):
    project = (
        '[project]\nname = "yours"\nversion = "2"\n'
        '[project.entry-points."rlhf_jax.commands"]\nsound = "sound_part:run"\n'
    )
    toy_packages.install(installed / "other", project, {})
    monkeypatch.syspath_prepend(str(installed / "other"))
    with pytest.raises(InputError, match=r"got mine and yours; uninstall all but one"):
        entry_points.load("sound", group="commands")
