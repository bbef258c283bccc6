"""Two options that exclude each other, or of which one needs the other.

Choices are {option that makes one: whether it is made}, as the option is written.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_jax.functional.checks import InputError

Choices = Mapping[str, bool]


def first(choices: Choices) -> str | None:
    """The first option that makes a choice; None where none does."""
    return next((option for option, chosen in choices.items() if chosen), None)


def exclude(choices: Choices, others: Choices, *, reason: str) -> None:
    """Checks that no choice of one kind meets one of the other.

    Args:
      reason: why, as the end of a sentence.

    Raises:
      InputError: names both options and the reason.
    """
    option, other = first(choices), first(others)
    if option is not None and other is not None:
        raise InputError(
            f"{option}: expected none with {other}, as {reason}; leave one of them out"
        )


def need(choices: Choices, other: str, *, has: bool) -> None:
    """Checks that no choice is made without the option that it belongs to.

    Args:
      other: that option, and `has` whether it is there.

    Raises:
      InputError: it is missing; names both.
    """
    option = first(choices)
    if option is not None and not has:
        raise InputError(
            f"{option}: expected {other} with it, which it belongs to, got none; give "
            f"both, or leave it out"
        )
