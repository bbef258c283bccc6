"""--verifier: how a response is checked, by name or as a function of your own."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from rlhf_jax.data.receipts import Receipt
from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.roles.rewards.verifiers import Verifier
from rlhf_jax.runs import command_line
from rlhf_jax.train.environment import opened as environment
from rlhf_jax.train.grpo.options import VerifiedConfig


class VerifierOptions(Protocol):
    """Options that name a verifier."""

    @property
    def verifier(self) -> str | None:
        """gsm8k, integer, exact or module:function."""
        ...

    @property
    def answer_field(self) -> str:
        """Field of the rows with the right answers."""
        ...

    @property
    def unmarked(self) -> Literal["wrong", "last_number"]:
        """What becomes of a response without #### with gsm8k."""
        ...


def make_verifier(options: VerifierOptions) -> Verifier:
    """The verifier that --verifier names.

    "gsm8k", "integer" and "exact" compare a response with --answer-field of its row:
    the number after ####, the last number, and the whole text. "module:function" is
    verify(prompt, response, row) -> float of an installed module, or one in the working
    directory; it reads the fields of the row that it needs.

    Raises:
      InputError: there is no such verifier, or it does not read an option that is set.
      StopError: the module calls `sys.exit` when it is imported.
    """
    name, field = options.verifier, options.answer_field
    if name != "gsm8k":
        _refuse(options, "--unmarked", options.unmarked, default="wrong")
    match name:
        case "gsm8k":
            return verifiers.Gsm8k(field, options.unmarked)
        case "integer":
            return verifiers.LastInteger(field)
        case "exact":
            return verifiers.ExactMatch(field)
    if name is None or ":" not in name:
        raise InputError(
            f"--verifier: expected gsm8k, integer, exact or module:function, got "
            f"{name!r}; choose one"
        )
    _refuse(options, "--answer-field", field, default="answer")
    return command_line.load_function(name)


def read_by_verifier(receipt: Receipt, *, options: VerifierOptions) -> None:
    """Tells which fields --verifier reads: one by name, or all for a function."""
    name = options.verifier
    if name is not None and ":" in name:
        receipt.gives(f"--verifier {name}")
    elif name is not None:
        receipt.reads(options.answer_field)


def require_some(scores: Scores, *, options: VerifiedConfig) -> None:
    """Stops a run of whose first batch no response could be scored.

    Args:
      scores: of the first batch, with `parts["failed"]`.
      options: of the run.

    Raises:
      StopError: every response failed.
    """
    if options.environment is not None:
        environment.require_some(scores, environment=options.environment)
        return
    failed = processes.whole(scores.parts["failed"])
    if not failed.all():
        return
    raise StopError(
        f"--verifier {options.verifier}: expected a number for some response of "
        f"the first batch, got none for {failed.size} of {failed.size} (the "
        f"warning above says why); mend it: a function of your own is "
        f"verify(prompt, response, row) -> float"
    )


def _refuse(options: VerifierOptions, option: str, value: Any, *, default: str) -> None:
    """InputError for an option that this verifier does not read."""
    if value != default:
        raise InputError(
            f"{option}: expected none with --verifier {options.verifier}, which does "
            f"not read it, got {value}; leave one of them out"
        )
