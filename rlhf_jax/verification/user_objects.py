"""User objects in worker processes: pickling, and reports of failures."""

from __future__ import annotations

import pickle
import re
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.rewards.scores import OnFailure
from rlhf_jax.verification.worker import Failed

_NUMBER = re.compile(r"\d+")


def check_options(*, timeout: float, on_failure: OnFailure) -> None:
    """Checks the options of a pool; InputError names the one that is not valid."""
    checks.positive(timeout=timeout)
    checks.one_of(on_failure=on_failure, among=get_args(OnFailure))


def check_counts(counts: Sequence[str], *, taken: Sequence[str], of: str) -> None:
    """Raises InputError if a count has the name of a figure that every `of` has."""
    taken = (*taken, "left_out")  # by `scores.part_stats`
    if same := sorted({*counts} & {*taken}):
        raise InputError(
            f"expected names of counts other than {', '.join(same)}, which every {of} "
            f"has; choose others"
        )


def pickled(value: Any, *, kind: str) -> bytes:
    """Pickles an object for the worker processes.

    Args:
      kind: what messages call the object, such as "verifier".

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
    except Exception as error:  # the object's own `__reduce__` may raise anything
        raise InputError(f"{expected}; got {value!r:.80}: {error}") from error
    of = value if isinstance(value, types.FunctionType) else type(value)
    if of.__module__ == "__main__":
        raise InputError(
            f"{expected}; got {value!r:.80} of the script that was started; move it "
            f"to a module beside it"
        )
    return data


def require(failed: Failed, *, of: str, case: str, stop: bool) -> None:
    """Raises StopError if the object cannot be imported or a failure stops the run.

    Args:
      of: what was called, such as "verifier".
      case: what fails, such as "a response".
      stop: whether any failure stops the run.
    """
    if failed.imported and not stop:
        return
    if failed.imported:
        remedy = (
            f" for {failed.where}; mend it, or let such {case} be left out"
            " (on_failure='leave_out')"
        )
    else:
        remedy = (
            "; expected one that the processes of the pool can import, so set"
            " PYTHONPATH, or mend its module"
        )
    raise StopError(f"the {of} {failed.why}{remedy}")


def warn(failures: Iterable[Failed], *, num_rows: int, rows: str, of: str) -> None:
    """Prints the count and first case of each kind of failure on standard error.

    Failures of a kind have the same `why` up to its colon, but for numbers.

    Args:
      num_rows: rows of the batch.
      rows: what the rows are and what happens to them: "responses are left out".
      of: what failed, such as "verifier".
    """
    kinds: dict[str, list[Failed]] = {}
    for failed in failures:
        kind = _NUMBER.sub("N", failed.why.partition(":")[0])
        kinds.setdefault(kind, []).append(failed)
    for first, *others in kinds.values():
        print(
            f"warning: {1 + len(others)} of {num_rows} {rows}; the {of} {first.why} "
            f"for {first.where}",
            file=sys.stderr,
        )
