"""Options of a `config.json`: required ones, defaults, and what is not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rlhf_jax.functional.checks import InputError

Activation = Literal["gelu_tanh", "gelu", "silu"]


ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
}


ACTIVATIONS_TO_HF = {"gelu_tanh": "gelu_new", "gelu": "gelu", "silu": "silu"}


def required(config: Mapping[str, Any], option: str) -> Any:
    """`config[option]`, or an InputError that names it."""
    if config.get(option) is None:
        raise InputError(
            f"config.json: expected a value for {option!r}, got none; "
            f"there is no model without it"
        )
    return config[option]


def option(config: Mapping[str, Any], option: str, default: Any) -> Any:
    """`config[option]`, or the default where it is absent or null."""
    value = config.get(option)
    return default if value is None else value


def only(config: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raises InputError for an option that is set to anything but what we implement.

    None is not set.
    """
    for option, value in supported.items():
        if config.get(option) not in (None, value):
            raise InputError(
                f"config.json: expected {option} = {value!r}, got {config[option]!r}; "
                f"the decoder implements nothing else, use another checkpoint"
            )


def activation(config: Mapping[str, Any], option: str, default: str) -> Activation:
    """Our name of an activation."""
    name = config.get(option, default)
    if name not in ACTIVATIONS:
        raise InputError(
            f"config.json: expected {option} to be one of {', '.join(ACTIVATIONS)}; "
            f"got {name!r}; use another checkpoint"
        )
    return ACTIVATIONS[name]
