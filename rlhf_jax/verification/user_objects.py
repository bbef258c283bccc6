"""An object of the user's that worker processes hold: how it is sent, and may fail."""

from __future__ import annotations

import pickle
import types
from typing import Any, Literal, get_args

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

OnFailure = Literal["leave_out", "zero", "stop"]


def check_options(*, timeout: float, on_failure: OnFailure) -> None:
    """InputError unless they can be chosen."""
    checks.positive(timeout=timeout)
    if on_failure not in get_args(OnFailure):
        raise InputError(
            f"on_failure: expected 'leave_out', 'zero' or 'stop', got {on_failure!r}; "
            f"choose one"
        )


def pickled(value: Any, *, kind: str) -> bytes:
    """An object as its processes get it.

    Args:
      kind: what messages call it, as "verifier".

    Raises:
      InputError: it cannot be sent to another process.
    """
    article = "an" if kind[0] in "aeiou" else "a"
    expected = (
        f"expected {article} {kind} that other processes can import: a function, or an "
        "instance of a class, at the top of a module"
    )
    try:
        data = pickle.dumps(value)
    except Exception as error:  # whatever its own state raises
        raise InputError(f"{expected}; got {value!r:.80}: {error}") from error
    of = value if isinstance(value, types.FunctionType) else type(value)
    if of.__module__ == "__main__":
        raise InputError(
            f"{expected}; got {value!r:.80} of the script that was started; move it "
            f"to a module beside it"
        )
    return data
