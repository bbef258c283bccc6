"""Two options that exclude each other, or of which one needs the other."""

from __future__ import annotations

from rlhf_jax.functional.checks import InputError


def exclude(first: str | None, second: str | None, *, reason: str) -> None:
    """Checks that two choices do not meet.

    Args:
      first, second: the options that make the choices; None where they are not made.
      reason: why, as the end of a sentence.

    Raises:
      InputError: both are made; names both options and the reason.
    """
    if first is not None and second is not None:
        raise InputError(
            f"{first}: expected none with {second}, as {reason}; leave one of them out"
        )


def need(option: str | None, other: str, *, has: bool) -> None:
    """Checks that a choice is not made without the option that reads it.

    Args:
      option: that makes the choice; None where it is not made.
      other: what it belongs to, and `has` whether that is there.

    Raises:
      InputError: it is missing; names both.
    """
    if option is not None and not has:
        raise InputError(
            f"{option}: expected {other} with it, which it belongs to, got none; give "
            f"both, or leave it out"
        )
