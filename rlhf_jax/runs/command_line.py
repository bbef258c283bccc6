"""From a command line to a config, and from a signal to a clean stop."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

import jax
import tyro

from rlhf_jax.devices import processes, program_cache
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import help_screen, lock, run_config, write_errors
from rlhf_jax.runs.folder import CONFIG, check_run, read_config
from rlhf_jax.runs.run_config import RunConfig, from_json, to_json

Config = TypeVar("Config", bound=RunConfig)
Presets = Mapping[str, Mapping[str, Any]]  # {name: {field: default}}


def main(
    run: Callable[[Config], None],
    config_class: type[Config],
    *,
    description: str | None,
    presets: Presets | None = None,
    screen: help_screen.Screen | None = None,
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Parses the command line, takes the run folder and calls `run(config)`.

    `--coordinator` and what goes with it join several processes first; the first of
    them talks, and every one tells its own errors. Compiled programs are kept for the
    next start, where `--compilation-cache` says.

    What the user got wrong ends with its message and status 2, a run that must not go
    on with status 1, a signal with how to go on and status 128 + its number, none with
    a traceback. Any other exception is a defect of ours and keeps it. Status 0 means
    that the run finished: `sys.exit(0)` somewhere in it gives 1.
    """
    try:
        argv = _join(sys.argv[1:] if argv is None else argv)
        processes.check_platform()
    except InputError as error:  # before JAX could tell of other processes
        _exit(2, f"error: {error}")
    try:
        cache, argv = _compilation_cache(argv)
        config = parse(
            config_class,
            description=description,
            presets=presets,
            screen=screen,
            prog=prog,
            argv=argv,
        )
        _check_shared(config)
        processes.agree("the config", json.dumps(to_json(config)))
        processes.on_first(lambda: check_run(config))
        if cache is None:
            program_cache.use_default()
        else:
            program_cache.use(None if cache == "None" else Path(cache))
    except InputError as error:
        _leave(2, f"error: {error}")
    except SystemExit as stop:  # an option that there is not, or --help
        if jax.process_count() == 1:
            raise
        _leave(stop.code if isinstance(stop.code, int) else 1, "")
    try:
        with (
            write_errors.quiet_threads(),
            _silent_unless_first(),
            contextlib.ExitStack() as folder,
            _writes_told(config.out),
        ):
            processes.on_first(lambda: folder.enter_context(lock.hold(config.out)))
            run(config)
    except InputError as error:
        _leave(2, f"error: {error}")
    except write_errors.WriteError as error:
        resume = go_on(config).replace("\n ", "")
        safe = write_errors.safe(config.out)
        _leave(1, f"stopped: {error}; {safe}; {error.remedy}, then {resume}")
    except StopError as error:
        _leave(1, f"stopped: {error}")
    except Interrupted as stop:
        _exit(128 + stop.signum, f"stopped and saved; {go_on(config)}")
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT, f"stopped without saving; {go_on(config)}")
    except SystemExit as stop:
        status, message = _exit_of(stop)
        _leave(status, f"stopped: {message}; {go_on(config)}")
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        # The others must not wait for this process, which Python would let them.
        traceback.print_exc()
        lost = "a process may be lost; the snapshots before stay"
        why = lost if isinstance(error, jax.errors.JaxRuntimeError) else "a defect"
        _leave(1, f"stopped: {why}; {go_on(config)}")


def _join(argv: Sequence[str]) -> Sequence[str]:
    """Joins the processes that the options name; the other options.

    Raises:
      InputError: as `processes.Group`, or there are options of it without a group.
    """
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--coordinator")
    before.add_argument("--num-processes", type=int)
    before.add_argument("--process-id", type=int)
    given, options = before.parse_known_args(argv)
    if given.coordinator is not None:
        processes.Group(**vars(given)).join()
    elif (given.num_processes, given.process_id) != (None, None):
        raise InputError(
            "--num-processes, --process-id: expected --coordinator HOST:PORT with "
            "them, got none; give it, or leave them out"
        )
    return options


def _compilation_cache(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """What --compilation-cache is given, if it is; the other options."""
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--compilation-cache")
    given, options = before.parse_known_args(argv)
    return given.compilation_cache, options


def _check_shared(config: RunConfig) -> None:
    if jax.process_count() > 1 and "placement" not in to_json(config):
        raise InputError(
            f"--coordinator: expected an experiment with --placement, got one for a "
            f"single process with {jax.process_count()}; leave it out"
        )


@contextlib.contextmanager
def _writes_told(folder: Path) -> Iterator[None]:
    """A failed write of the experiment's own is a WriteError too."""
    try:
        yield
    except OSError as error:
        told = write_errors.of_run(error, folder=folder)
        if told is None:
            raise
        raise told from error


@contextlib.contextmanager
def _silent_unless_first() -> Iterator[None]:
    if processes.is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def parse(
    config_class: type[Config],
    *,
    description: str | None,
    presets: Presets | None = None,
    screen: help_screen.Screen | None = None,
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> Config:
    """The command line as a config, each field an option: kl_coef is --kl-coef.

    `--config RUN/config.json` takes a recorded config for the defaults, with RUN
    itself, wherever it lies now, as --out. `--preset NAME` takes other defaults, those
    of `presets`. Unknown options exit with status 2. `--help-all` lists every option;
    `--help` only those of `screen`, or every one without a screen.

    Raises:
      InputError: the recorded config does not fit; names the fields. There is no such
        preset, or it is asked for with --config.
    """
    presets = {} if presets is None else presets
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path)
    if presets:
        before.add_argument("--preset")
    given, options = before.parse_known_args(argv)
    preset = given.preset if presets else None
    defaults = tyro.MISSING_NONPROP
    if preset is not None:
        if preset not in presets or given.config is not None:
            got = "--config too" if preset in presets else preset
            raise InputError(
                f"--preset: expected one of {', '.join(presets)}, without --config, "
                f"got {got}; the options of a recorded run hold those of its preset"
            )
        config_class = _with_defaults(config_class, presets[preset])
    if given.config is not None:
        fields = read_config(given.config)
        fields |= {"out": os.fspath(given.config.parent), "resume": False}
        # Of one resume alone; older configs have neither.
        fields |= {"resume_from": None, "accept_lost_rows": False}
        names = {field.name for field in dataclasses.fields(config_class)}
        fields = run_config.complete(fields, names=names)
        defaults = from_json(config_class, fields, source=given.config)
    description = (description or "").strip()
    if screen is not None and not {"-h", "--help"}.isdisjoint(options):
        print(
            help_screen.screen(
                config_class,
                prog=prog or Path(sys.argv[0]).name,
                description=description,
                options=screen,
                notes=_notes(presets),
                defaults=None if given.config is None else defaults,
            )
        )
        raise SystemExit(0)
    options = ["--help" if each == "--help-all" else each for each in options]
    if presets:
        description = (
            f"{description}\n\n--preset {'|'.join(presets)} starts from the options of "
            "a published recipe."
        )
    return tyro.cli(
        config_class,
        prog=prog,
        args=options,
        default=defaults,
        description=f"{description}\n\n--config RUN/config.json starts from "
        "the options recorded in RUN instead of the defaults below; add --resume to go "
        "on with that run, or --out to repeat it elsewhere.\n\n--coordinator "
        "HOST:PORT --num-processes N --process-id I, or on a TPU pod or Slurm "
        "--coordinator auto, make this one of the processes of a run.\n\n"
        "--compilation-cache FOLDER keeps compiled programs there for the next start, "
        "instead of ~/.cache/rlhf_jax/compiled; None keeps none.",
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


def load_function(spec: str) -> Callable[..., Any]:
    """The function of "module:function", installed or in the working directory.

    Raises:
      InputError: `spec` is of another form, the module cannot be imported, or has no
        such function.
      StopError: the module calls `sys.exit` when it is imported.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise InputError(f"expected module:function, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except SystemExit as stop:
        raise StopError(
            f"{spec}: expected a module {module_name} that can be imported, got one "
            f"that calls sys.exit({stop.code!r:.80}); put what it runs as a script "
            f'under `if __name__ == "__main__":`'
        ) from stop
    except Exception as error:  # whatever the user's own code raises
        raise InputError(
            f"{spec}: expected a module {module_name}, installed or in {os.getcwd()}, "
            f"got {type(error).__name__}: {error}"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        got = "no such name" if function is None else type(function).__name__
        raise InputError(
            f"{spec}: expected a function {name} in {module.__file__}, got {got}; "
            f"define it there, or name another"
        )
    return function


class Interrupted(Exception):
    """The run was asked to stop, and has saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupt:
    """Turns SIGTERM and Ctrl-C into a request; a second Ctrl-C stops at once.

    with cli.Interrupt() as interrupt:
        for step in range(start, num_steps):
            ...
            if interrupt.requested or (step + 1) % config.snapshot_every == 0:
                record.flush()
                snapshots.save(step + 1, arrays=..., meta=...)
            interrupt.check()
    """

    def __init__(self, *, on_request: Callable[[], None] | None = None) -> None:
        """Nothing was requested yet; `on_request` is called at each signal."""
        self._signum: int | None = None
        self._on_request = on_request

    @property
    def requested(self) -> bool:
        """True once a signal has come: save, then `check`."""
        return self._signum is not None

    def check(self) -> None:
        """Raises Interrupted if a stop was requested; call it after saving."""
        if self.requested:
            self.stop()

    def stop(self) -> NoReturn:
        """Raises Interrupted, of the signal that came here or to another process."""
        raise Interrupted(signal.SIGTERM if self._signum is None else self._signum)

    def __enter__(self) -> Self:
        self._previous = {
            signum: signal.signal(signum, self._on_signal)
            for signum in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._signum = signum
        if self._on_request is not None:
            self._on_request()
        # Not `print`: the step may be inside one, whose buffer is not reentrant.
        os.write(2, b"\nstopping after this step; Ctrl-C (again) stops at once\n")


def go_on(config: RunConfig) -> str:
    """How to resume a run that stops, for a message."""
    recorded = config.out / CONFIG
    if not recorded.exists():
        return "start again, as nothing was written yet"
    script = Path(sys.argv[0])
    command = f"python {script}"
    if script.name == "rlhf-jax" or script.parts[-2:] == ("train", "main.py"):
        command = " ".join(("rlhf-jax", *sys.argv[1:2]))  # and the trainer's name
    return f"go on with\n  {command} --config {recorded} --resume"


def _exit_of(stop: SystemExit) -> tuple[int, str]:
    """Status and message of a run that `sys.exit` ended: the status is never 0."""
    status = stop.code if isinstance(stop.code, int) else 1
    if status % 256 == 0:  # what the system keeps of it
        status = 1
    return status, (
        f"expected the run to finish, got sys.exit({stop.code!r:.80}) inside it; look "
        f"for it in your own code"
    )


def _leave(status: int, message: str) -> NoReturn:
    """Ends this process for a reason that the others may not have."""
    if jax.process_count() > 1:
        if message:
            print(message, file=sys.stderr, flush=True)
        os._exit(status)  # at once: leaving in order would wait for the others
    _exit(status, message)


def _exit(status: int, message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status)
