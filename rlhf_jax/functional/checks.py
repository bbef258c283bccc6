"""Errors that say what was expected, what arrived and what to do next.

The checks of arrays read shapes and dtypes only, so under `jax.jit` they run once, at
trace time. They raise plain ValueError and TypeError: a wrong array comes from code,
and the author of that code needs the traceback. The checks of numbers raise InputError:
a wrong number comes from an option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional.errors import InputError, StopError
from rlhf_jax.functional.number_checks import (
    LARGEST_FLOAT,
    at_least_one,
    finite,
    fraction,
    groups,
    non_negative,
    positive,
    rows,
)

__all__ = [
    "LARGEST_FLOAT",
    "InputError",
    "StopError",
    "at_least_one",
    "boolean",
    "finite",
    "float32",
    "floating",
    "fraction",
    "groups",
    "int32",
    "listed",
    "non_negative",
    "one_of",
    "positive",
    "rows",
    "same_shape",
    "shape",
]

Array = jax.Array


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


def one_of(*, among: tuple[Any, ...], **choices: Any) -> None:
    """Checks that a choice is one of some.

    Args:
      among: what there is to choose from.
      choices: by the names that the error shows.

    Raises:
      InputError: one is none of them.

    >>> print(one_of(kind="ipo", among=("sigmoid", "ipo")))
    None
    >>> one_of(kind="kto", among=("sigmoid", "ipo"))
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: kind: expected one of 'sigmoid', 'ipo', got
        'kto'; choose one
    """
    for name, choice in choices.items():
        if choice not in among:
            raise InputError(
                f"{name}: expected one of {', '.join(map(repr, among))}, got "
                f"{choice!r}; choose one"
            )


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
