"""Errors that say what was expected, what arrived and what to do next.

The checks of arrays read shapes and dtypes only, so under `jax.jit` they run once, at
trace time. They raise plain ValueError and TypeError: a wrong array comes from code,
and whoever wrote that code wants the traceback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Array = jax.Array

LARGEST_FLOAT = 2.0**128 - 2.0**104  # of float32
_SMALLEST_FLOAT = 2.0**-126  # of float32 with all its digits
_LARGEST_COUNT = 2**31 - 1  # of int32
_MOST_ROWS = 2**20  # of a batch, which the host makes of Python's lists


class InputError(ValueError):
    """What the user gave is wrong: a file, an option or an argument.

    The command line prints the message alone and exits with status 2; any other
    exception is a defect of ours and keeps its traceback.
    """


class StopError(RuntimeError):
    """The run must not go on: a frozen model moved, a self-check failed, it diverged.

    The command line prints the message alone and exits with status 1.
    """


def same_shape(**arrays: Array) -> None:
    """Raises ValueError unless all arrays have one shape (nothing is broadcast)."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"expected arrays of one shape, got {got}; cut or broadcast them "
            "explicitly, column t of each being about tokens[:, t]"
        )


def shape(expected: tuple[int | None, ...], **arrays: Array) -> None:
    """Raises ValueError unless every array has shape `expected`; None is any size."""
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
    """Raises TypeError unless every array is float32."""
    for name, array in arrays.items():
        if array.dtype != jnp.float32:
            raise TypeError(
                f"{name}: expected float32, got {array.dtype}; log-probs, values and "
                "rewards stay float32 whatever the compute dtype, so cast where it "
                "is made: .astype(jnp.float32)"
            )


def floating(**arrays: Array) -> None:
    """Raises TypeError unless every array is of a floating dtype."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name}: expected a floating dtype, got {array.dtype}; pass float32, "
                "bfloat16 or float16"
            )


def int32(**arrays: Array) -> None:
    """Raises TypeError unless every array is int32."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise TypeError(
                f"{name}: expected int32, got {array.dtype}; cast ids and lengths "
                "with .astype(jnp.int32)"
            )


def boolean(**arrays: Array) -> None:
    """Raises TypeError unless every array is bool."""
    for name, array in arrays.items():
        if array.dtype != jnp.bool_:
            raise TypeError(
                f"{name}: expected bool, got {array.dtype}; make masks from lengths "
                "(masked.lengths_to_mask), never from tokens != pad"
            )


def positive(**numbers: float | Array) -> None:
    """Raises InputError unless every number is > 0 and finite; arrays pass unread."""
    for name, number in numbers.items():
        if isinstance(number, int | float) and not 0 < number < math.inf:
            raise InputError(
                f"{name}: expected a finite number above 0, got {_shown(number)}; "
                f"choose {name} > 0"
            )
        _held(name, number)


def non_negative(**numbers: float | Array) -> None:
    """Raises InputError unless every number is >= 0 and finite; arrays pass unread."""
    for name, number in numbers.items():
        if isinstance(number, int | float) and not 0 <= number < math.inf:
            raise InputError(
                f"{name}: expected a finite number, 0 or more, got {_shown(number)}; "
                f"choose {name} >= 0"
            )
        _held(name, number)


def finite(**numbers: float | Array) -> None:
    """Raises InputError unless every number is finite; arrays pass unread."""
    for name, number in numbers.items():
        # Compared, since `math.isfinite` fails for an int beyond float64.
        if isinstance(number, int | float) and not -math.inf < number < math.inf:
            raise InputError(
                f"{name}: expected a finite number, got {number}; choose another"
            )
        _held(name, number)


def fraction(**numbers: float | Array) -> None:
    """Raises InputError unless every number is from 0 to 1; arrays pass unread."""
    for name, number in numbers.items():
        if isinstance(number, int | float) and not 0 <= number <= 1:
            raise InputError(
                f"{name}: expected a number from 0 to 1, got {_shown(number)}; "
                f"choose 0 <= {name} <= 1"
            )


def rows(**numbers: int) -> None:
    """Raises InputError unless every number of rows is one that the host can make."""
    positive(**numbers)
    for name, number in numbers.items():
        if number > _MOST_ROWS:
            raise InputError(
                f"{name}: expected at most {_MOST_ROWS} rows, got {number}; choose a "
                f"smaller {name}, and more steps"
            )


def _held(name: str, number: float | Array) -> None:
    """Raises InputError where a number of Python's is none of float32 or int32."""
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
    """The first `most` of them, a line each, and how many more there are."""
    lines = [f"  {problem}" for problem in problems[:most]]
    if len(problems) > most:
        lines.append(f"  and {len(problems) - most} more")
    return "\n".join(lines)


def groups(rows: int, *, group_size: int, least: int = 1) -> None:
    """Raises InputError unless `rows` are whole groups of at least `least`."""
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
