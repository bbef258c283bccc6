"""The main function of every trainer and experiment: options, errors, exit status.

A signal stops a run between two of its steps (`Interrupt`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

import jax

from rlhf_jax.devices import precision, processes, program_cache
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import lock, progress, stops, write_errors
from rlhf_jax.runs.command_line import help_screen, refusals
from rlhf_jax.runs.command_line.options import HELP, Config, Presets, parse
from rlhf_jax.runs.folder import CONFIG, check_run
from rlhf_jax.runs.object_storage import mirror
from rlhf_jax.runs.run_config import RunConfig, to_json
from rlhf_jax.runs.snapshots import jsonl

LOST = "a process may be lost; earlier snapshots are kept"


def main(
    run: Callable[[Config], None],
    config_class: type[Config],
    *,
    description: str | None,
    presets: Presets | None = None,
    screen: help_screen.Screen | None = None,
    renamed: Mapping[str, str] | None = None,
    prog: str | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Parses the command line, locks the run folder and calls `run(config)`.

    `--coordinator` and its companions first join several processes, of which only the
    first writes to stdout; each reports its own errors. `--compilation-cache` names the
    folder that keeps compiled programs for the next start.

    A mistake of the user ends with a message and status 2, a run that must stop with
    status 1, and a signal with the command to resume and status 128 + its number, all
    without a traceback. Any other exception is a defect and shows its traceback. Status
    0 means that the run finished; `sys.exit(0)` inside it gives 1.
    """
    try:
        cache, argv = _join(sys.argv[1:] if argv is None else argv)
        if HELP.isdisjoint(argv):  # help must not wait for or occupy an accelerator
            processes.check_platform()
    except InputError as error:  # JAX does not know the other processes yet
        _exit(2, f"error: {error}")
    try:
        config = parse(
            config_class,
            description=description,
            presets=presets,
            screen=screen,
            renamed=renamed,
            prog=prog,
            argv=argv,
        )
        if jax.process_count() > 1 and "placement" not in to_json(config):
            raise InputError(
                f"--coordinator: expected an experiment with --placement, got one for "
                f"a single process with {jax.process_count()}; leave it out"
            )
        processes.agree("the config", json.dumps(to_json(config)))
        processes.agree(precision.VARIABLE, precision.name())
        processes.on_first(lambda: _check(config))
        if cache is None:
            program_cache.use_default()
        else:
            program_cache.use(None if cache == "None" else Path(cache))
    except InputError as error:
        _leave(2, f"error: {error}")
    except BrokenPipeError:  # the reader of the help has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(0, "")
    except SystemExit as stop:  # --help
        if not jax.distributed.is_initialized():  # process_count() would start a device
            raise
        _leave(stop.code if isinstance(stop.code, int) else 1, "")
    try:
        with (
            write_errors.quiet_threads(),
            _ended_by_sigterm(),
            _silent_unless_first(),
            progress.hidden(not (config.progress and processes.is_first())),
            processes.last_words(
                f"stopped: {LOST}; the same command goes on, --resume"
            ),
            contextlib.ExitStack() as folder,
            write_errors.of_run(config.out),
            precision.of(config.compute_dtype),
        ):
            processes.on_first(lambda: folder.enter_context(lock.hold(config.out)))
            with mirror.kept(config.out), refusals.naming(type(config), argv):
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
    except KeyboardInterrupt as stop:
        ended = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        _leave(128 + ended, f"stopped without saving; {go_on(config)}")
    except SystemExit as stop:
        # Never status 0; the system keeps only the last byte of it.
        status = stop.code if isinstance(stop.code, int) and stop.code % 256 else 1
        what = f"expected the run to finish, got sys.exit({stop.code!r:.80}) inside it"
        own = "look for it in your own code"
        _leave(status, f"stopped: {what}; {own}; {go_on(config)}")
    except BaseException as error:
        if (out_of := _out_of_memory(error)) is not None:
            less = "fewer rows at a time take less"
            _leave(1, f"stopped: {out_of}; {less}; {go_on(config)}")
        if jax.process_count() == 1:
            raise
        # By itself Python would leave the other processes waiting for this one.
        if isinstance(error, jax.errors.JaxRuntimeError):
            first = next(iter(str(error).splitlines()), "")
            _leave(1, f"stopped: {LOST} ({first:.200}); {go_on(config)}")
        traceback.print_exc()
        _leave(1, f"stopped: a defect; {go_on(config)}")


def _check(config: RunConfig) -> None:
    mirror.begin(config.out, resume=config.resume or config.resume_from is not None)
    check_run(config)
    goes_on = config.resume and config.resume_from is None
    if goes_on and not config.accept_lost_rows:
        jsonl.require_rows(config.out)


def _out_of_memory(error: BaseException) -> str | None:
    """The message of a device that has no memory left; None for other errors."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    first = next(iter(str(error).splitlines()), "")
    full = re.search(
        r"RESOURCE_EXHAUSTED.*(out of memory|allocat|reserve)|CUDA_ERROR_OUT_OF_MEMORY",
        first,
        re.IGNORECASE,
    )
    return first[:300] if full else None


def _join(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Joins the processes of --coordinator, if given.

    Returns:
      The value of --compilation-cache, None if absent, and the remaining options.

    Raises:
      InputError: as `processes.Group`, or --coordinator is missing beside its options.
    """
    before = refusals.Arguments(add_help=False, allow_abbrev=False)
    before.add_argument("--coordinator")
    before.add_argument("--num-processes", type=int)
    before.add_argument("--process-id", type=int)
    before.add_argument("--join-timeout", type=int)
    before.add_argument("--heartbeat", type=int)
    before.add_argument("--compilation-cache")
    arguments, options = before.parse_known_args(argv)
    group = {name: x for name, x in vars(arguments).items() if x is not None}
    cache = group.pop("compilation_cache", None)
    if "coordinator" in group:
        processes.Group(**group).join()
    elif group:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in group)
        raise InputError(
            f"{names}: expected --coordinator HOST:PORT too, got none; give it, or "
            f"leave this out"
        )
    return cache, options


class Terminated(KeyboardInterrupt):
    """SIGTERM outside the stages of a run; it ends the process as Ctrl-C does."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, end)
    signals = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
    hook = stops.sent_again(signals)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _silent_unless_first() -> Iterator[None]:
    if processes.is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _leave(status: int, message: str) -> NoReturn:
    """Ends this process for a reason that other processes may not have."""
    if jax.process_count() > 1:
        if message:
            print(message, file=sys.stderr, flush=True)
        processes.exit_with_others(status)
    _exit(status, message)


def _exit(status: int, message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status)


class Interrupted(Exception):
    """A signal asked the run to stop, and it has saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupt:
    """Turns SIGTERM and Ctrl-C into a request; a second Ctrl-C stops at once.

    with command_line.Interrupt() as interrupt:
        for step in range(start, num_steps):
            ...
            if interrupt.requested or (step + 1) % config.snapshot_every == 0:
                record.flush()
                snapshots.save(step + 1, arrays=..., meta=...)
            interrupt.check()
    """

    def __init__(self, *, on_request: Callable[[], None] | None = None) -> None:
        """Stores `on_request`, which is called at each signal."""
        self._signum: int | None = None
        self._on_request = on_request

    @property
    def requested(self) -> bool:
        """Whether a signal has come; if so, save and call `check`."""
        return self._signum is not None

    def check(self) -> None:
        """Raises Interrupted if a stop was requested; call it after saving."""
        if self.requested:
            self.stop()

    def stop(self) -> NoReturn:
        """Raises Interrupted for the signal that this or another process received."""
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
        # Not `print`, whose buffer is not reentrant: the signal may interrupt one.
        os.write(2, b"\nstopping after this step; Ctrl-C (again) stops at once\n")


def go_on(config: RunConfig) -> str:
    """Returns the part of a message that says how to resume a stopped run.

    The command enters the run's working folder, since options may be relative paths or
    name modules there.
    """
    if not (config.out / CONFIG).exists():
        return "start again, as nothing was written yet"
    recorded = f"{mirror.written(config.out)}/{CONFIG}"
    script = Path(sys.argv[0])
    command = f"python {script}"
    modules = (("train", "main.py"), ("rlhf_jax", "__main__.py"))
    if script.name == "rlhf-jax" or script.parts[-2:] in modules:
        command = " ".join(("rlhf-jax", *sys.argv[1:2]))  # with the trainer's name
    here = shlex.quote(os.getcwd())
    return f"go on with\n  cd {here} && {command} --config {recorded} --resume"
