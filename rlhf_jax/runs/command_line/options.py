"""From a command line, a preset or a recorded config to a config."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import run_config
from rlhf_jax.runs.command_line import help_screen, renamed
from rlhf_jax.runs.folder import read_config
from rlhf_jax.runs.run_config import RunConfig, from_json

Config = TypeVar("Config", bound=RunConfig)


Presets = Mapping[str, Mapping[str, Any]]  # {name: {field: default}}


def parse(
    config_class: type[Config],
    *,
    description: str | None,
    presets: Presets | None = None,
    screen: help_screen.Screen | None = None,
    elsewhere: Mapping[str, str] | None = None,
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> Config:
    """The command line as a config, each field an option: kl_coef is --kl-coef.

    `--config RUN/config.json` takes a recorded config for the defaults, with RUN
    itself, wherever it lies now, as --out. `--preset NAME` takes other defaults, those
    of `presets`. Unknown options exit with status 2. `--help-all` lists every option;
    `--help` only those of `screen`, or every one without a screen. `elsewhere` has
    options of other commands, {option: which take it, and what to do}.

    Raises:
      InputError: the recorded config does not fit; names the fields. There is no such
        preset, or it is asked for with --config. An option is called something else
        since version 0.1; names the new one. An option is one of `elsewhere`.
    """
    presets = {} if presets is None else presets
    prog = prog or Path(sys.argv[0]).name
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path)
    if presets:
        before.add_argument("--preset")
    arguments, options = before.parse_known_args(argv)
    renamed.refuse(config_class, options)
    _refuse_elsewhere({} if elsewhere is None else elsewhere, options)
    preset = arguments.preset if presets else None
    defaults = tyro.MISSING_NONPROP
    if preset is not None:
        if preset not in presets or arguments.config is not None:
            got = "--config too" if preset in presets else preset
            raise InputError(
                f"--preset: expected one of {', '.join(presets)}, without --config, "
                f"got {got}; the options of a recorded run hold those of its preset"
            )
        config_class = _with_defaults(config_class, presets[preset])
    if arguments.config is not None:
        fields = read_config(arguments.config)
        fields |= {"out": os.fspath(arguments.config.parent), "resume": False}
        # Of one resume alone; older configs have neither.
        fields |= {"resume_from": None, "accept_lost_rows": False}
        names = run_config.option_names(config_class)
        fields = run_config.complete(fields, names=names)
        defaults = from_json(config_class, fields, source=arguments.config)
    description = (description or "").strip()
    if screen is not None and not {"-h", "--help"}.isdisjoint(options):
        print(
            help_screen.screen(
                config_class,
                prog=prog,
                description=description,
                options=screen,
                notes=_notes(presets),
                defaults=None if arguments.config is None else defaults,
            )
        )
        raise SystemExit(0)
    options = ["--help" if each == "--help-all" else each for each in options]
    if presets:
        description = (
            f"{description}\n\n--preset {'|'.join(presets)} starts from the options of "
            "a published recipe."
        )
    description = (
        f"{description}\n\n--config RUN/config.json starts from "
        "the options recorded in RUN instead of the defaults below; add --resume to go "
        "on with that run, or --out to repeat it elsewhere.\n\n--coordinator "
        "HOST:PORT --num-processes N --process-id I, or on a TPU pod or Slurm "
        "--coordinator auto, make this one of the processes of a run.\n\n"
        "--compilation-cache FOLDER keeps compiled programs there for the next start, "
        "instead of ~/.cache/rlhf_jax/compiled; None keeps none."
    )
    # tyro's footer of an error names --help, which shows only the options of `screen`.
    own_footer = screen is not None and "--help" not in options
    try:
        return tyro.cli(
            config_class,
            prog=prog,
            args=options,
            default=defaults,
            description=description,
            add_help=not own_footer,
        )
    except SystemExit as stop:
        if own_footer and stop.code == 2:
            print(f"For every option, run {prog} --help-all", file=sys.stderr)
        raise


def _refuse_elsewhere(elsewhere: Mapping[str, str], options: Sequence[str]) -> None:
    for text in options:
        name = text.partition("=")[0].replace("_", "-")
        if name in elsewhere:
            raise InputError(
                f"{name}: expected an option of this command, got one of "
                f"{elsewhere[name]}"
            )


def _notes(presets: Presets) -> list[str]:
    """What stands below the options of `--help`."""
    recipes = f"--preset {'|'.join(presets)} starts from a published recipe."
    return [
        *([recipes] if presets else []),
        "--config RUN/config.json repeats a recorded run, or with --resume goes on.",
        "--help-all lists every option; [ ] holds defaults.",
    ]


def _with_defaults(
    config_class: type[Config], defaults: Mapping[str, Any]
) -> type[Config]:
    """The same config with other defaults, which --help shows."""
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
