"""The environments that --environment names."""

from __future__ import annotations

from rlhf_jax.environments.calculator import Calculator
from rlhf_jax.environments.guessing import Guessing
from rlhf_jax.environments.programming import Programming
from rlhf_jax.environments.protocol import Environment
from rlhf_jax.environments.rooms import Rooms
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line

NAMES = "calculator, guessing, programming, rooms"


def make_environment(name: str) -> Environment:
    """The environment that --environment names.

    "module:name" is a class of yours, or a function without arguments, whose result is
    an environment.

    Raises:
      InputError: there is no such environment, or what it makes is none.
      StopError: the module calls `sys.exit` when it is imported.
    """
    match name:
        case "calculator":
            return Calculator()
        case "guessing":
            return Guessing()
        case "programming":
            return Programming()
        case "rooms":
            return Rooms()
    if ":" not in name:
        raise InputError(
            f"--environment: expected {NAMES} or module:name, got {name!r}; choose one"
        )
    make = command_line.load_function(name, kind="class")
    try:
        environment = make()
    except Exception as error:  # whatever the user's own code raises
        raise InputError(
            f"--environment {name}: expected a class or a function without arguments "
            f"that makes an environment, got {type(error).__name__}: {error}"
        ) from error
    if not isinstance(environment, Environment):
        raise InputError(
            f"--environment {name}: expected what it makes to have the methods reset "
            f"and step, got {environment!r:.80}; see environments/README.md"
        )
    return environment
