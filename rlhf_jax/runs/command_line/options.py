"""Parses a command line, with presets and config files, into a config.

`load_function` imports a user's Python function that is named on the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import choices, folder, parsing, run_config
from rlhf_jax.runs.command_line import help_screen, refusals
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.run_config import RunConfig

Config = TypeVar("Config", bound=RunConfig)
Presets = Mapping[str, Mapping[str, Any]]  # {name: {field: default}}
HELP = frozenset({"-h", "--help", "--help-all"})
# Options of a single resume, which are not taken from a recorded config.
OF_ONE_RESUME = ("resume", "resume_from", "accept_lost_rows")
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def parse(
    config_class: type[Config],
    *,
    description: str | None,
    presets: Presets | None = None,
    screen: help_screen.Screen | None = None,
    renamed: Mapping[str, str] | None = None,
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> Config:
    """Parses a command line into a config, each field an option: kl_coef is --kl-coef.

    `--config FILE` reads any part of the config's tree from TOML, YAML or JSON; options
    on the command line override it. With RUN/config.json, --out is that file's folder.
    `--preset NAME` replaces defaults by those in `presets`. `--help-all` lists every
    option; `--help` lists those of `screen`, or every one without a screen. `renamed`
    is {option of an earlier version or another program: present option}.

    Raises:
      InputError: the file does not fit the config (the message names the fields), the
        preset is unknown or given beside a recorded config, an option is unknown or in
        `renamed`, or its value is not of its type.
    """
    presets = presets or {}
    prog = prog or Path(sys.argv[0]).name
    before = refusals.Arguments(add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path)
    if presets:
        before.add_argument("--preset")
    arguments, options = before.parse_known_args(argv)
    _refuse_renamed(renamed or {}, options, config_class)
    preset = arguments.preset if presets else None
    if preset is not None:
        recorded = arguments.config and arguments.config.name == folder.CONFIG
        if preset not in presets or recorded:
            expected, remedy = f"one of {', '.join(presets)}", "choose another"
            if recorded:
                expected = "none with the --config of a recorded run, which has its own"
                remedy = "give one of the two alone"
            raise InputError(
                f"--preset: expected {expected}, got {preset}; {remedy}, or leave it "
                f"out"
            )
        config_class = _with_defaults(config_class, presets[preset])
    if arguments.config is not None:
        path = arguments.config
        fields = read_file(path)
        options = [
            *run_config.arguments(config_class, fields, source=path, renamed=renamed),
            *options,
        ]
    description = (description or "").strip()
    if screen is not None and not (HELP - {"--help-all"}).isdisjoint(options):
        print(
            help_screen.screen(
                config_class,
                prog=prog,
                description=description,
                options=screen,
                notes=_notes(presets),
            )
        )
        raise SystemExit(0)
    options = ["--help" if option == "--help-all" else option for option in options]
    if presets:
        description = (
            f"{description}\n\n--preset {'|'.join(presets)} starts from the options of "
            "a published recipe."
        )
    description = (
        f"{description}\n\n--config FILE takes options from a file of TOML, YAML or "
        "JSON; those on the command line win. With RUN/config.json, add --resume to go "
        "on with that run, or --out to repeat it elsewhere.\n\n--coordinator "
        "HOST:PORT --num-processes N --process-id I, or on a TPU pod or Slurm "
        "--coordinator auto, make this one of the processes of a run. They have "
        "--join-timeout seconds to come (120), and one that is silent for --heartbeat "
        "seconds (20) is lost.\n\n"
        "--compilation-cache FOLDER keeps compiled programs there for the next start, "
        "instead of ~/.cache/rlhf_jax/compiled; None keeps none."
    )
    return refusals.cli(
        config_class,
        prog=prog,
        args=options,
        description=description,
        # An error names --help-all where --help shows only the options of `screen`.
        add_help=screen is None or "--help" in options,
    )


def read_file(path: Path) -> dict[str, Any]:
    """Returns the fields in a --config FILE of TOML, YAML or JSON, as JSON values.

    The config.json of a run has all fields; `out` is the folder of that file.

    Raises:
      InputError: the file cannot be read or parsed, or holds no fields, or it is a
        recorded config under another name.
    """
    if path.name == folder.CONFIG:
        fields = folder.read_config(urls.fetched(path))
        fields["out"] = urls.of(path.parent) or os.fspath(path.parent)
        return {name: x for name, x in fields.items() if name not in OF_ONE_RESUME}
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"--config {path}: expected a name that ends in .toml, .yaml, .yml or "
            f".json, got {path.suffix!r}; rename it"
        )
    fields = parsing.read_object(
        urls.fetched(path),
        expected=f"options by their names in {path.suffix[1:]}",
        advice="name them, as in the config.json of a run",
    )
    if fields.keys() >= {"config", "versions"}:
        raise InputError(
            f"--config {path}: expected options by their names, got the "
            f"{folder.CONFIG} of a run under another name; give RUN/{folder.CONFIG}, "
            f'or a file with what is in its "config"'
        )
    return fields


def _refuse_renamed(
    renamed: Mapping[str, str], options: Sequence[str], config_class: type[Any]
) -> None:
    known = dict(choices.options(config_class))
    for text in options:
        name = text.partition("=")[0].replace("_", "-")
        if name in renamed and name not in known:
            successor = renamed[name]
            exists = successor.split()[0] in known
            raise InputError(
                f"expected an option of this command, got {name}; "
                f"{f'write {successor}' if exists else 'leave it out'}"
            )


def _notes(presets: Presets) -> list[str]:
    names = [*presets]
    more = f" and {len(names) - 8} others" if len(names) > 9 else ""
    shown = ", ".join(names[:8] if more else names)
    recipes = f"--preset NAME starts from a published recipe: {shown}{more}."
    return [
        *([recipes] if presets else []),
        "--config FILE reads options from TOML, YAML or JSON; RUN/config.json "
        "repeats a run, or with --resume goes on.",
        "--help-all lists every option; [ ] holds defaults.",
    ]


def _with_defaults(
    config_class: type[Config], defaults: Mapping[str, Any]
) -> type[Config]:
    """A subclass of the config with other defaults, which --help shows."""
    types = typing.get_type_hints(config_class, include_extras=True)
    return dataclasses.make_dataclass(
        config_class.__name__,
        [
            (name, types[name], dataclasses.field(default=value))
            for name, value in defaults.items()
        ],
        bases=(config_class,),
        frozen=True,
        kw_only=True,
    )


def load_function(
    spec: str,
    *,
    kind: str = "function",
    called: str = "",
    takes: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Imports the function "module:function", installed or in the working directory.

    Args:
      kind: its kind in messages, such as "class".
      called: its option in messages, such as "--reward".
      takes: names of the arguments that it is called with; None checks none.

    Raises:
      InputError: `spec` has another form, the module cannot be imported or lacks the
        function, or the function takes other arguments.
      StopError: the module calls `sys.exit` when it is imported.
    """
    module_name, _, name = spec.partition(":")
    where = f"{called} {spec}".strip()
    if not module_name or not name:
        option = f"{called}: " if called else ""
        raise InputError(
            f"{option}expected module:{kind}, got {spec!r}; name both, as "
            f"my_module:my_{kind}"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except SystemExit as stop:
        raise StopError(
            f"{where}: expected a module {module_name} that can be imported, got one "
            f"that calls sys.exit({stop.code!r:.80}); put what it runs as a script "
            f'under `if __name__ == "__main__":`'
        ) from stop
    except Exception as error:  # the user's code may raise anything
        raise InputError(
            f"{where}: expected a module {module_name}, installed or in {os.getcwd()}, "
            f"got {type(error).__name__}: {error}; correct the name, or the module"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        got = "no such name" if function is None else type(function).__name__
        # Neither a built-in module nor a folder without __init__.py has a file.
        place = getattr(module, "__file__", None) or f"the module {module_name}"
        raise InputError(
            f"{where}: expected a {kind} {name} in {place}, got {got}; "
            f"define it there, or name another"
        )
    if takes is not None:
        expect_arguments(function, takes=takes, where=where)
    return function


def expect_arguments(function: Any, *, takes: Sequence[str], where: str) -> None:
    """Checks that a function can be called with these positional arguments.

    Raises:
      InputError: it is a class, or takes fewer or more; the message names both.
    """
    if isinstance(function, type):
        raise InputError(
            f"{where}: expected a function, or an object that is called like one, got "
            f"the class {function.__name__}; name an object of it"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # C code may have no signature
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise InputError(
            f"{where}: expected a function of ({', '.join(takes)}), got "
            f"{signature!s:.80} ({error}); give it these arguments"
        ) from None
