"""Checks of numbers, which come from options: they raise InputError."""

from __future__ import annotations

import math

import jax

from rlhf_jax.functional.errors import InputError

Array = jax.Array

LARGEST_FLOAT = 2.0**128 - 2.0**104  # of float32
_SMALLEST_FLOAT = 2.0**-126  # the smallest normal float32
_LARGEST_COUNT = 2**31 - 1  # of int32
_MOST_ROWS = 2**20  # of a batch: the host builds batches from Python lists


def positive(**numbers: float | Array) -> None:
    """Checks that every number is above 0 and finite; arrays are not read.

    Args:
      numbers: numbers by the names that the error shows.

    Raises:
      InputError: a number is not, or float32 or int32 cannot represent it.

    >>> print(positive(clip_range=0.2))
    None
    >>> positive(clip_range=0.0)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: clip_range: expected a finite number
        above 0, got 0.0; choose clip_range > 0
    """
    for name, number in numbers.items():
        if isinstance(number, int | float) and not 0 < number < math.inf:
            raise InputError(
                f"{name}: expected a finite number above 0, got {_shown(number)}; "
                f"choose {name} > 0"
            )
        _representable(name, number)


def non_negative(**numbers: float | Array) -> None:
    """Checks that every number is 0 or more and finite; arrays are not read.

    Args:
      numbers: numbers by the names that the error shows.

    Raises:
      InputError: a number is not, or float32 or int32 cannot represent it.

    >>> print(non_negative(kl_coef=0.0))
    None
    >>> non_negative(kl_coef=-0.1)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: kl_coef: expected a finite number, 0
        or more, got -0.1; choose kl_coef >= 0
    """
    for name, number in numbers.items():
        if isinstance(number, int | float) and not 0 <= number < math.inf:
            raise InputError(
                f"{name}: expected a finite number, 0 or more, got {_shown(number)}; "
                f"choose {name} >= 0"
            )
        _representable(name, number)


def finite(**numbers: float | Array) -> None:
    """Checks that every number is finite; arrays are not read.

    Args:
      numbers: numbers by the names that the error shows.

    Raises:
      InputError: a number is not, or float32 or int32 cannot represent it.

    >>> print(finite(weight=-1.0))
    None
    >>> finite(weight=float("nan"))
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: weight: expected a finite number, got
        nan; choose another
    """
    for name, number in numbers.items():
        # Compared, since `math.isfinite` fails for an int beyond float64.
        if isinstance(number, int | float) and not -math.inf < number < math.inf:
            raise InputError(
                f"{name}: expected a finite number, got {number}; choose another"
            )
        _representable(name, number)


def fraction(**numbers: float | Array) -> None:
    """Checks that every number is from 0 to 1; arrays are not read.

    Args:
      numbers: numbers by the names that the error shows.

    Raises:
      InputError: a number is below 0, above 1 or NaN.

    >>> print(fraction(lam=0.95))
    None
    >>> fraction(lam=1.5)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: lam: expected a number from 0 to 1,
        got 1.5; choose 0 <= lam <= 1
    """
    for name, number in numbers.items():
        if isinstance(number, int | float) and not 0 <= number <= 1:
            raise InputError(
                f"{name}: expected a number from 0 to 1, got {_shown(number)}; "
                f"choose 0 <= {name} <= 1"
            )


def at_least_one(**numbers: int) -> None:
    """Checks integers that never become an array: 1 or more, of any size.

    Args:
      numbers: numbers by the names that the error shows.

    Raises:
      InputError: a number is below 1, or not an integer.

    >>> print(at_least_one(max_logits=2**33))
    None
    >>> at_least_one(max_logits=0)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: max_logits: expected a whole number,
        1 or more, got 0; choose max_logits >= 1
    """
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise InputError(
                f"{name}: expected a whole number, 1 or more, got {number!r}; choose "
                f"{name} >= 1"
            )


def rows(**numbers: int) -> None:
    """Checks that every number of rows is positive and small enough for the host.

    Args:
      numbers: numbers of rows by the names that the error shows.

    Raises:
      InputError: a number is not positive, or above 2²⁰.

    >>> print(rows(batch_size=512))
    None
    >>> rows(batch_size=2**21)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: batch_size: expected at most 1048576
        rows, got 2097152; choose a smaller batch_size, and more steps
    """
    positive(**numbers)
    for name, number in numbers.items():
        if number > _MOST_ROWS:
            raise InputError(
                f"{name}: expected at most {_MOST_ROWS} rows, got {number}; choose a "
                f"smaller {name}, and more steps"
            )


def _representable(name: str, number: float | Array) -> None:
    """Raises InputError where float32 or int32 cannot represent a Python number."""
    if isinstance(number, int) and abs(number) > _LARGEST_COUNT:
        raise InputError(
            f"{name}: expected a whole number of at most {_LARGEST_COUNT}, got "
            f"{_shown(number)}; choose a smaller one"
        )
    if isinstance(number, float) and not (
        number == 0 or _SMALLEST_FLOAT <= abs(number) <= LARGEST_FLOAT
    ):
        raise InputError(
            f"{name}: expected a number that float32 holds, of a size from 1.2e-38 to "
            f"3.4e38, got {number}; choose another"
        )


def _shown(number: float | Array) -> str:
    """A number for a message; an integer beyond int32 by its size alone."""
    if isinstance(number, int) and abs(number) > _LARGEST_COUNT:
        sign = "a negative one" if number < 0 else "one"
        return f"{sign} of {number.bit_length()} bits"
    return f"{number}"


def groups(rows: int, *, group_size: int, least: int = 1) -> None:
    """Checks that the rows of a batch are whole groups.

    Args:
      rows: number of rows of the batch.
      group_size: number of rows of a group.
      least: the smallest group_size that is allowed.

    Raises:
      InputError: group_size is below `least` or does not divide the rows.

    >>> print(groups(6, group_size=3))
    None
    >>> groups(6, group_size=4)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: group_size: expected to divide the 6
        rows of a batch, got 4; change either
    """
    if group_size < least:
        raise InputError(
            f"group_size: expected at least {least}, got {_shown(group_size)}; sample "
            f"more responses to each prompt"
        )
    if rows < 1 or rows % group_size:
        raise InputError(
            f"group_size: expected to divide the {rows} rows of a batch, got "
            f"{_shown(group_size)}; change either"
        )
