"""Checks whose errors say what was expected, what arrived and what to do next.

Arguments are passed by keyword: the error shows their names. The checks of arrays read
shapes and dtypes only, so under `jax.jit` they run once, at trace time. They raise
plain ValueError (shapes) and TypeError (dtypes): a wrong array comes from code, and the
author of that code needs the traceback. The checks of options raise InputError: a wrong
number comes from a user. Python and NumPy numbers are checked (`number`); None (off)
passes, and so do JAX arrays, which may be traced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from rlhf_jax.functional.errors import InputError as InputError
from rlhf_jax.functional.errors import StopError as StopError

Array = jax.Array
Scalar = float | Float32[Array, ""]
"""A numeric option: a number, or an f32[] that may be traced, as by `jax.vmap`."""

LARGEST_FLOAT = 2.0**128 - 2.0**104  # of float32
_SMALLEST_FLOAT = 2.0**-126  # the smallest normal float32
_LARGEST_COUNT = 2**31 - 1  # of int32
_MOST_ROWS = 2**20  # of a batch: the host builds batches from Python lists


def positive(**numbers: Scalar | None) -> None:
    """Checks that numbers are above 0, finite, and fit float32 or int32.

    >>> print(positive(clip_range=0.2))
    None
    >>> positive(clip_range=0.0)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: clip_range: expected a finite number
        above 0, got 0.0; choose clip_range > 0
    """
    _require(numbers, "a finite number above 0", "choose {name} > 0", above=0)


def non_negative(**numbers: Scalar | None) -> None:
    """Checks that numbers are 0 or more, finite, and fit float32 or int32.

    >>> print(non_negative(kl_coef=0.0))
    None
    >>> non_negative(kl_coef=-0.1)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: kl_coef: expected a finite number, 0
        or more, got -0.1; choose kl_coef >= 0
    """
    _require(numbers, "a finite number, 0 or more", "choose {name} >= 0", least=0)


def finite(**numbers: Scalar | None) -> None:
    """Checks that numbers are finite, and fit float32 or int32.

    >>> print(finite(weight=-1.0))
    None
    >>> finite(weight=float("nan"))
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: weight: expected a finite number, got
        nan; choose another
    """
    _require(numbers, "a finite number", "choose another")


def fraction(**numbers: Scalar | None) -> None:
    """Checks that numbers are from 0 to 1, and fit float32.

    >>> print(fraction(lam=0.95))
    None
    >>> fraction(lam=1.5)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: lam: expected a number from 0 to 1,
        got 1.5; choose 0 <= lam <= 1
    """
    advice = "choose 0 <= {name} <= 1"
    _require(numbers, "a number from 0 to 1", advice, least=0, most=1)


def within(
    *,
    advice: str,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    **numbers: Scalar | None,
) -> None:
    """Checks that numbers are within bounds, and finite; `advice` ends the message.

    >>> print(within(above=1, advice="choose 3", dual_clip=3.0))
    None
    >>> within(least=0, below=1, advice="choose 0.9", b1=1.0)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: b1: expected a number of at least 0 and
        below 1, got 1.0; choose 0.9
    """
    limits = {"above": above, "least": least, "below": below, "most": most}
    words = {"least": "of at least", "most": "of at most"}
    stated = " and ".join(
        f"{words.get(name, name)} {x}" for name, x in limits.items() if x is not None
    )
    _require(numbers, f"a number {stated}", advice, **limits)


def at_least_one(**numbers: Any) -> None:
    """Checks integers that never become an array: 1 or more, of any size.

    >>> print(at_least_one(max_logits=2**33))
    None
    >>> at_least_one(max_logits=0)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: max_logits: expected a whole number,
        1 or more, got 0; choose max_logits >= 1
    """
    for name, value in numbers.items():
        count = number(value)
        if isinstance(count, bool | float | None) or count < 1:
            got = repr(value if count is None else count)
            raise InputError(
                f"{name}: expected a whole number, 1 or more, got {got}; choose "
                f"{name} >= 1"
            )


def rows(**numbers: int) -> None:
    """Checks that numbers of rows are positive and small enough for the host.

    >>> print(rows(batch_size=512))
    None
    >>> rows(batch_size=2**21)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: batch_size: expected at most 1048576
        rows, got 2097152; choose a smaller batch_size, and more steps
    """
    positive(**numbers)
    advice = "choose a smaller {name}, and more steps"
    _require(numbers, f"at most {_MOST_ROWS} rows", advice, most=_MOST_ROWS)


def number(value: Any) -> int | float | None:
    """The value of a Python or NumPy number; None for None and for arrays of JAX.

    >>> number(np.float64(0.5)), number(2)
    (0.5, 2)
    >>> print(number(jnp.float32(0.5)), number(None))
    None None
    """
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int | float) else None


def _require(
    numbers: dict[str, Any],
    expected: str,
    advice: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Raises InputError for a number out of bounds, or one that no array can hold."""
    for name, value in numbers.items():
        if isinstance(value, Array | np.ndarray) and value.ndim:
            raise InputError(
                f"{name}: expected one number, got an array of shape {value.shape}; "
                f"map over several by jax.vmap"
            )
        n = number(value)
        if n is None:
            continue
        wanted, advised = expected, advice.replace("{name}", name)
        # `math.isfinite` fails for an int beyond float64.
        if (
            -math.inf < n < math.inf
            and (above is None or above < n)
            and (least is None or least <= n)
            and (below is None or n < below)
            and (most is None or n <= most)
        ):
            bounded = most is not None or below is not None  # a seed is a uint32
            if isinstance(n, int) and abs(n) > _LARGEST_COUNT and not bounded:
                wanted = f"a whole number of at most {_LARGEST_COUNT}"
                advised = "choose a smaller one"
            elif isinstance(n, float) and not (
                n == 0 or _SMALLEST_FLOAT <= abs(n) <= LARGEST_FLOAT
            ):
                wanted = "a number that float32 holds, of a size from 1.2e-38 to 3.4e38"
                advised = "choose another"
            else:
                continue
        raise InputError(f"{name}: expected {wanted}, got {_shown(n)}; {advised}")


def _shown(number: float) -> str:
    """Formats a number; an integer beyond 64 bits by its size alone."""
    if isinstance(number, int) and number.bit_length() > 64:
        sign = "a negative one" if number < 0 else "one"
        return f"{sign} of {number.bit_length()} bits"
    return f"{number}"


def groups(rows: int, *, group_size: int, least: int = 1) -> None:
    """Checks that a batch divides into groups, each of `least` rows or more.

    >>> print(groups(6, group_size=3))
    None
    >>> groups(6, group_size=4)
    Traceback (most recent call last):
        ...
    rlhf_jax.functional.errors.InputError: group_size: expected to divide the 6
        rows of a batch, got 4; change either
    """
    small = group_size < least
    if small or rows < 1 or rows % group_size:
        expected = (
            f"at least {least}" if small else f"to divide the {rows} rows of a batch"
        )
        advice = "sample more responses to each prompt" if small else "change either"
        raise InputError(
            f"group_size: expected {expected}, got {_shown(group_size)}; {advice}"
        )


def one_of(*, among: tuple[Any, ...], **choices: Any) -> None:
    """Checks that each choice is in `among`.

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


def same_shape(**arrays: Array) -> None:
    """Checks that all arrays have one shape; nothing is broadcast.

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
    """Checks that arrays have a shape; None stands for any size of an axis.

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
    """Checks that arrays are float32.

    >>> print(float32(logprobs=jnp.zeros(2, jnp.float32)))
    None
    >>> float32(logprobs=jnp.zeros(2, jnp.bfloat16))
    Traceback (most recent call last):
        ...
    TypeError: logprobs: expected float32, got bfloat16; log-probs, values and rewards
        stay float32 whatever the compute dtype, so cast where it is made:
        .astype(jnp.float32)
    """
    _require_dtype(
        arrays,
        jnp.float32,
        "float32",
        "log-probs, values and rewards stay float32 whatever the compute dtype, so "
        "cast where it is made: .astype(jnp.float32)",
    )


def floating(**arrays: Array) -> None:
    """Checks that arrays have a floating dtype.

    >>> print(floating(logits=jnp.zeros(2, jnp.bfloat16)))
    None
    >>> floating(logits=jnp.zeros(2, jnp.int32))
    Traceback (most recent call last):
        ...
    TypeError: logits: expected a floating dtype, got int32; pass float32, bfloat16 or
        float16
    """
    _require_dtype(
        arrays, jnp.floating, "a floating dtype", "pass float32, bfloat16 or float16"
    )


def int32(**arrays: Array) -> None:
    """Checks that arrays are int32.

    >>> print(int32(tokens=jnp.zeros(2, jnp.int32)))
    None
    >>> int32(tokens=jnp.zeros(2, jnp.float32))
    Traceback (most recent call last):
        ...
    TypeError: tokens: expected int32, got float32; cast ids and lengths with
        .astype(jnp.int32)
    """
    _require_dtype(
        arrays, jnp.int32, "int32", "cast ids and lengths with .astype(jnp.int32)"
    )


def boolean(**arrays: Array) -> None:
    """Checks that arrays are bool.

    >>> print(boolean(mask=jnp.zeros(2, jnp.bool_)))
    None
    >>> boolean(mask=jnp.zeros(2, jnp.int32))
    Traceback (most recent call last):
        ...
    TypeError: mask: expected bool, got int32; make masks from lengths
        (masked.lengths_to_mask), never from tokens != pad
    """
    _require_dtype(
        arrays,
        jnp.bool_,
        "bool",
        "make masks from lengths (masked.lengths_to_mask), never from tokens != pad",
    )


def _require_dtype(
    arrays: dict[str, Array], kind: Any, expected: str, advice: str
) -> None:
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, kind):
            raise TypeError(f"{name}: expected {expected}, got {array.dtype}; {advice}")


def masked_floats(mask: Array, **floats: Array) -> None:
    """Checks that a mask is bool, and arrays are float32 and of its shape.

    >>> mask = jnp.zeros((2, 3), jnp.bool_)
    >>> print(masked_floats(mask, values=jnp.zeros((2, 3))))
    None
    >>> masked_floats(mask, values=jnp.zeros((2, 1)))
    Traceback (most recent call last):
        ...
    ValueError: expected arrays of one shape, got values (2, 1), mask (2, 3); ...
    """
    same_shape(**floats, mask=mask)
    float32(**floats)
    boolean(mask=mask)


def listed(problems: Sequence[str], *, most: int = 20) -> str:
    """Formats the first `most` problems, one per indented line, and counts the others.

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
