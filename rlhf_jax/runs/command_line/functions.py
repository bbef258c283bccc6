"""A user's own Python function, named on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rlhf_jax.functional.checks import InputError, StopError


def load_function(spec: str, *, kind: str = "function") -> Callable[..., Any]:
    """The function of "module:function", installed or in the working directory.

    Messages call it by its `kind`, as "class".

    Raises:
      InputError: `spec` is of another form, the module cannot be imported, or has no
        such function.
      StopError: the module calls `sys.exit` when it is imported.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise InputError(f"expected module:{kind}, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except SystemExit as stop:
        raise StopError(
            f"{spec}: expected a module {module_name} that can be imported, got one "
            f"that calls sys.exit({stop.code!r:.80}); put what it runs as a script "
            f'under `if __name__ == "__main__":`'
        ) from stop
    except Exception as error:  # whatever the user's own code raises
        raise InputError(
            f"{spec}: expected a module {module_name}, installed or in {os.getcwd()}, "
            f"got {type(error).__name__}: {error}"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        got = "no such name" if function is None else type(function).__name__
        raise InputError(
            f"{spec}: expected a {kind} {name} in {module.__file__}, got {got}; "
            f"define it there, or name another"
        )
    return function
