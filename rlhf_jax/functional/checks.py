"""Errors that say what was expected, what arrived and what to do next.

The checks of arrays read shapes and dtypes only, so under `jax.jit` they run once, at
trace time. They raise plain ValueError and TypeError: a wrong array comes from code,
and the author of that code needs the traceback. The checks of numbers raise InputError:
a wrong number comes from an option.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Array = jax.Array

LARGEST_FLOAT = 2.0**128 - 2.0**104  # of float32
_SMALLEST_FLOAT = 2.0**-126  # the smallest normal float32
_LARGEST_COUNT = 2**31 - 1  # of int32
_MOST_ROWS = 2**20  # of a batch: the host builds batches from Python lists


class InputError(ValueError):
    """An input of the user is wrong: a file, an option or an argument.

    The command line prints the message alone and exits with status 2. Any other
    exception is a defect of the program and keeps its traceback.
    """


class StopError(RuntimeError):
    """The run has to stop: a frozen model moved, a self-check failed, or it diverged.

    The command line prints the message alone and exits with status 1.
    """


def same_shape(**arrays: Array) -> None:
    """Checks that all arrays have one shape; nothing is broadcast.

    Args:
      arrays: arrays by the names that the error shows.

    Raises:
      ValueError: shapes differ.

    >>> print(same_shape(logprobs=jnp.zeros((2, 3)), mask=jnp.zeros((2, 3))))
    None
    >>> same_shape(logprobs=jnp.zeros((2, 3)), mask=jnp.zeros((2, 1)))
    Traceback (most recent call last):
        ...
    ValueError: expected arrays of one shape, got logprobs (2, 3), mask (2, 1); cut or
        broadcast them explicitly, column t of each being about tokens[:, t]
    """
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"expected arrays of one shape, got {got}; cut or broadcast them "
            "explicitly, column t of each being about tokens[:, t]"
        )


def shape(expected: tuple[int | None, ...], **arrays: Array) -> None:
    """Checks that every array has a shape.

    Args:
      expected: the sizes of the axes; None stands for any size.
      arrays: arrays by the names that the error shows.

    Raises:
      ValueError: an array has another shape.

    >>> print(shape((None, 3), tokens=jnp.zeros((2, 3))))
    None
    >>> shape((None, 3), tokens=jnp.zeros((2, 4)))
    Traceback (most recent call last):
        ...
    ValueError: tokens: expected shape (any, 3), got (2, 4); pass arrays that belong to
        one batch, with every axis explicit
    """
    for name, array in arrays.items():
        got = jnp.shape(array)
        if len(got) != len(expected) or any(
            size not in (None, n) for size, n in zip(expected, got, strict=True)
        ):
            sizes = ["any" if size is None else str(size) for size in expected]
            raise ValueError(
                f"{name}: expected shape ({', '.join(sizes)}), got {got}; pass arrays "
                "that belong to one batch, with every axis explicit"
            )


def float32(**arrays: Array) -> None:
    """Checks that every array is float32.

    Args:
      arrays: arrays by the names that the error shows.

    Raises:
      TypeError: an array has another dtype.

    >>> print(float32(logprobs=jnp.zeros(2, jnp.float32)))
    None
    >>> float32(logprobs=jnp.zeros(2, jnp.bfloat16))
    Traceback (most recent call last):
        ...
    TypeError: logprobs: expected float32, got bfloat16; log-probs, values and rewards
        stay float32 whatever the compute dtype, so cast where it is made:
        .astype(jnp.float32)
    """
    for name, array in arrays.items():
        if array.dtype != jnp.float32:
            raise TypeError(
                f"{name}: expected float32, got {array.dtype}; log-probs, values and "
                "rewards stay float32 whatever the compute dtype, so cast where it "
                "is made: .astype(jnp.float32)"
            )


def floating(**arrays: Array) -> None:
    """Checks that every array has a floating dtype.

    Args:
      arrays: arrays by the names that the error shows.

    Raises:
      TypeError: an array has another dtype.

    >>> print(floating(logits=jnp.zeros(2, jnp.bfloat16)))
    None
    >>> floating(logits=jnp.zeros(2, jnp.int32))
    Traceback (most recent call last):
        ...
    TypeError: logits: expected a floating dtype, got int32; pass float32, bfloat16 or
        float16
    """
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name}: expected a floating dtype, got {array.dtype}; pass float32, "
                "bfloat16 or float16"
            )


def int32(**arrays: Array) -> None:
    """Checks that every array is int32.

    Args:
      arrays: arrays by the names that the error shows.

    Raises:
      TypeError: an array has another dtype.

    >>> print(int32(tokens=jnp.zeros(2, jnp.int32)))
    None
    >>> int32(tokens=jnp.zeros(2, jnp.float32))
    Traceback (most recent call last):
        ...
    TypeError: tokens: expected int32, got float32; cast ids and lengths with
        .astype(jnp.int32)
    """
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise TypeError(
                f"{name}: expected int32, got {array.dtype}; cast ids and lengths "
                "with .astype(jnp.int32)"
            )


def boolean(**arrays: Array) -> None:
    """Checks that every array is bool.

    Args:
      arrays: arrays by the names that the error shows.

    Raises:
      TypeError: an array has another dtype.

    >>> print(boolean(mask=jnp.zeros(2, jnp.bool_)))
    None
    >>> boolean(mask=jnp.zeros(2, jnp.int32))
    Traceback (most recent call last):
        ...
    TypeError: mask: expected bool, got int32; make masks from lengths
        (masked.lengths_to_mask), never from tokens != pad
    """
    for name, array in arrays.items():
        if array.dtype != jnp.bool_:
            raise TypeError(
                f"{name}: expected bool, got {array.dtype}; make masks from lengths "
                "(masked.lengths_to_mask), never from tokens != pad"
            )


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
    rlhf_jax.functional.checks.InputError: clip_range: expected a finite number above 0,
        got 0.0; choose clip_range > 0
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
    rlhf_jax.functional.checks.InputError: kl_coef: expected a finite number, 0 or more,
        got -0.1; choose kl_coef >= 0
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
    rlhf_jax.functional.checks.InputError: weight: expected a finite number, got nan;
        choose another
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
    rlhf_jax.functional.checks.InputError: lam: expected a number from 0 to 1, got 1.5;
        choose 0 <= lam <= 1
    """
    for name, number in numbers.items():
        if isinstance(number, int | float) and not 0 <= number <= 1:
            raise InputError(
                f"{name}: expected a number from 0 to 1, got {_shown(number)}; "
                f"choose 0 <= {name} <= 1"
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
    rlhf_jax.functional.checks.InputError: batch_size: expected at most 1048576 rows,
        got 2097152; choose a smaller batch_size, and more steps
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


def listed(problems: Sequence[str], *, most: int = 20) -> str:
    """The first `most` problems, one per line, and the number of the others.

    Args:
      problems: what is wrong, one sentence each.
      most: the largest number of problems that are shown.

    Returns:
      Lines, indented by two spaces.

    >>> print(listed(["line 3: no prompt", "line 5: no prompt"]).replace("  ", "- "))
    - line 3: no prompt
    - line 5: no prompt
    >>> print(listed(["one", "two", "three"], most=1).replace("  ", "- "))
    - one
    - and 2 more
    """
    lines = [f"  {problem}" for problem in problems[:most]]
    if len(problems) > most:
        lines.append(f"  and {len(problems) - most} more")
    return "\n".join(lines)


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
    rlhf_jax.functional.checks.InputError: group_size: expected to divide the 6 rows of
        a batch, got 4; change either
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
