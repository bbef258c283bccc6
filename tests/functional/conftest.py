"""Checks shapes against signatures in all tests of functional/."""

import functools
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterator
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import BeartypeConf
from beartype.door import is_bearable
from jaxtyping import jaxtyped

from rlhf_jax import functional

# An int is a float, as for type checkers.
INT_IS_FLOAT = BeartypeConf(is_pep484_tower=True)


@functools.cache
def checked(function: Callable) -> Callable:
    """Wraps a function to check arguments and result against its annotated shapes.

    The function's own errors come first; all other calls must match the signature.
    """
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        hints["return"] = typing.Any  # what it yields: the result is a context
    met = set()

    @functools.wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        form = form_of((args, kwargs, result))
        if form in met:
            return result
        met.add(form)
        arguments = signature.bind(*args, **kwargs).arguments
        values = [
            (name, value, hint)
            for name, argument in arguments.items()
            for value, hint in values_of(
                argument, signature.parameters[name].kind, hints[name]
            )
        ]
        with jaxtyped("context"):  # a size has one value in all of them
            for name, value, hint in [*values, ("the result", result, hints["return"])]:
                value = jax.tree.map(as_jax, value)
                assert is_bearable(value, hint, conf=INT_IS_FLOAT), (
                    f"{function.__module__}.{function.__name__}: {name} is not {hint}, "
                    f"but {value}"
                )
        return result

    return call


def form_of(values) -> tuple:
    """The properties of values that a shape check depends on."""
    leaves, structure = jax.tree.flatten(values)
    return structure, *(
        (type(leaf), leaf.shape, leaf.dtype)
        if hasattr(leaf, "shape")
        else (type(leaf), leaf if isinstance(leaf, str | int) else None)
        for leaf in leaves
    )


def values_of(argument, kind, hint) -> list:
    """The values of a parameter with their hints; *args and **kwargs have several."""
    if kind is inspect.Parameter.VAR_KEYWORD:
        unpacked = typing.get_origin(hint) is typing.Unpack
        hints = typing.get_type_hints(*typing.get_args(hint)) if unpacked else {}
        return [(value, hints.get(name, hint)) for name, value in argument.items()]
    several = kind is inspect.Parameter.VAR_POSITIONAL
    return [(value, hint) for value in (argument if several else [argument])]


def as_jax(value):
    """Converts NumPy arrays, which the functions accept too."""
    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


@pytest.fixture(scope="module", autouse=True)
def shapes_are_checked() -> Iterator[None]:
    """Checks the public functions of functional/ while a test module runs."""
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
