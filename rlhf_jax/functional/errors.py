"""The two errors that the command line prints without a traceback, and their helpers.

This module loads no JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """A file, an option or an argument from the user is wrong.

    The command line prints the message alone and exits with status 2. Any other
    exception is a defect of the program and keeps its traceback.
    """


class StopError(RuntimeError):
    """The run has to stop: a frozen model moved, a self-check failed, or it diverged.

    The command line prints the message alone and exits with status 1.
    """


@contextlib.contextmanager
def located(where: str, kind: type[Exception] = InputError) -> Iterator[None]:
    """Prefixes the message of an error with its place: "prompts.jsonl:3: expected ...".

    Raises:
      InputError: in place of an error of type `kind`.

    >>> with located("--placement.policy"):
    ...     raise InputError("expected a mesh, got none")
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: --placement.policy: expected a mesh, got none
    >>> with located("prompts.jsonl:3", ValueError):
    ...     int("3a", base=10)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: prompts.jsonl:3: invalid literal for int()
        with base 10: '3a'
    """
    try:
        yield
    except kind as error:
        raise InputError(f"{where}: {error}") from error.__cause__


def expect_none(because: str, *, advice: str, **options: object) -> None:
    """Checks that options are None where another choice excludes them.

    >>> expect_none("with kind 'ipo'", advice="leave it out", target_margin=None)
    >>> expect_none("with kind 'ipo'", advice="leave it out", target_margin=0.5)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: target_margin: expected none with kind 'ipo',
        got 0.5; leave it out
    >>> expect_none("without --lora", advice="add it", alpha=None, rank=0)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: rank: expected none without --lora, got 0;
        add it
    """
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name}: expected none {because}, got {value}; {advice}")


def refuse(faults: Iterable[str]) -> None:
    """Raises InputError with one fault per line; returns where there is no fault.

    >>> refuse([])
    >>> refuse(["top_k: expected 1 or more, got 0"])
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: top_k: expected 1 or more, got 0
    >>> refuse(["top_k: expected 1 or more, got 0", "top_p: expected 1, got 2"])
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: top_k: expected 1 or more, got 0
    top_p: expected 1, got 2
    """
    if message := "\n".join(faults):
        raise InputError(message)


def expect_between(least: int, most: int, **numbers: int) -> None:
    """Checks numbers in modules that load no JAX; others have `checks.within`.

    >>> print(expect_between(2, 8, num_rooms=5))
    None
    >>> expect_between(2, 8, num_rooms=9)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: num_rooms: expected at least 2 and at most 8,
        got 9; choose another
    """
    faults = [
        f"{name}: expected at least {least} and at most {most}, got {number}; choose "
        f"another"
        for name, number in numbers.items()
        if not least <= number <= most
    ]
    refuse(faults)
