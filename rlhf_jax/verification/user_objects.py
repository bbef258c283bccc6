"""An object of the user's that worker processes hold: how it is sent, and may fail."""

from __future__ import annotations

import pickle
import re
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.rewards.scores import OnFailure

_NUMBER = re.compile(r"\d+")


def check_options(*, timeout: float, on_failure: OnFailure) -> None:
    """InputError unless they can be chosen."""
    checks.positive(timeout=timeout)
    checks.one_of(on_failure=on_failure, among=get_args(OnFailure))


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


def require(
    why: str, *, imported: bool, of: str, where: str, case: str, stop: bool
) -> None:
    """StopError where the object cannot be imported, or where a failure stops the run.

    Args:
      why: a call failed, as "raised KeyError: 'gold'"; "" if it did not.
      of: what was called, as "verifier".
      where: of which case, as "prompt 'Hi' (row 3) and response 'Yo'".
      case: what fails, as "a response".
      stop: whether any failure stops the run.
    """
    if not imported:
        remedy = (
            "; expected one that the processes of the pool can import, so set"
            " PYTHONPATH, or mend its module"
        )
    elif why and stop:
        remedy = (
            f" for {where}; mend it, or let such {case} be left out"
            " (on_failure='leave_out')"
        )
    else:
        return
    raise StopError(f"the {of} {why}{remedy}")


class Failure(NamedTuple):
    """Why a call has no result."""

    why: str  # "raised KeyError: 'gold'"
    where: str  # "prompt 'Hi' (row 3) and response 'Yo'"

    @property
    def kind(self) -> str:
        """The same for failures that differ in their numbers, or in what they name."""
        return _NUMBER.sub("N", self.why.partition(":")[0])


def warn(failures: Iterable[Failure], *, num_rows: int, rows: str, of: str) -> None:
    """Prints one line per kind of failure on standard error, with the first of each.

    Args:
      num_rows: of the batch.
      rows: what they are and what becomes of them, as "responses were left out".
      of: what failed, as "verifier".
    """
    kinds: dict[str, list[Failure]] = {}
    for failure in failures:
        kinds.setdefault(failure.kind, []).append(failure)
    for alike in kinds.values():
        why, where = alike[0]
        print(
            f"warning: {len(alike)} of {num_rows} {rows}; the {of} {why} for {where}",
            file=sys.stderr,
        )
