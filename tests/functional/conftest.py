"""The tests of functional/ check the shapes in the signatures of what they call."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, jaxtyped

from rlhf_jax import functional

# An int is a float, as for type checkers.
typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
checked_functions: dict[Callable, Callable] = {}


def checked(function: Callable) -> Callable:
    """The function, held to the shapes and dtypes of its annotations.

    Where it refuses its arguments itself, its own error comes first.
    """
    if function not in checked_functions:
        typed = jaxtyped(function, typechecker=typechecker)

        def call(*args, **kwargs):
            try:
                return typed(*args, **kwargs)
            except TypeCheckError:
                function(*args, **kwargs)
                raise

        checked_functions[function] = call
    return checked_functions[function]


@pytest.fixture(scope="module", autouse=True)
def shapes_are_checked() -> Iterator[None]:
    """While the tests of a module run, public functions of functional/ are checked."""
    with pytest.MonkeyPatch.context() as patch:
        for info in pkgutil.walk_packages(functional.__path__, "rlhf_jax.functional."):
            module = import_module(info.name)
            for name, value in vars(module).items():
                place = getattr(value, "__module__", None) or ""
                if not inspect.isfunction(value) or name.startswith("_"):
                    continue
                if place.startswith("rlhf_jax.functional"):
                    patch.setattr(module, name, checked(value))
        yield
