"""Options of version 0.1 that have another name now, for the message about them."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import run_config

FROZEN = {
    "mesh": "--placement.{role} AXIS=SIZE,...",
    "own-devices": "--placement.{role} last:AXIS=SIZE,...",
    "memory": "--placement.{role} policy, cpu or pinned_host",
}
RENAMED = {
    "--mesh": "--placement.policy AXIS=SIZE,...",
    "--sampling-mesh": "--placement.sampler last:AXIS=SIZE,...",
    "--critic-mesh": "--placement.critic last:AXIS=SIZE,...",
    **{
        f"--{role}-storage.{option}": text.format(role=role)
        for role in ("reference", "reward")
        for option, text in FROZEN.items()
    },
    **{
        f"--{before}".replace("_", "-"): f"--{now}".replace("_", "-")
        for before, now in run_config.RENAMED.items()
    },
}
"""{option of 0.1: what to write today}."""


def refuse(config_class: type[Any], options: Sequence[str]) -> None:
    """Refuses an option of 0.1 by the name that it has today.

    Options that the config has, or whose new option it lacks, are left alone.

    Args:
      config_class: The dataclass whose fields are the options.
      options: The command line.

    Raises:
      InputError: An option has another name now; says which.
    """
    known = _names(config_class)
    for text in options:
        name = text.partition("=")[0].replace("_", "-")
        before = re.sub(r"^(--|--.*\.)no-", r"\1", name)  # --no-X turns a switch off
        now = RENAMED.get(before)
        if now is None or before in known or now.split()[0] not in known:
            continue
        raise InputError(
            f"{name}: expected an option of this version, got one of 0.1; give {now} "
            f"in its place"
        )


def _names(kind: type[Any], *, prefix: str = "--") -> set[str]:
    """The options of a dataclass with those of its groups, and the groups' names."""
    names: set[str] = set()
    for field, hint in typing.get_type_hints(kind, include_extras=True).items():
        extras = getattr(hint, "__metadata__", ())
        unnamed = any(getattr(extra, "name", None) == "" for extra in extras)
        name = prefix + field.replace("_", "-")
        names.add(name)
        plain = hint.__origin__ if extras else hint
        for inner in (plain, *typing.get_args(plain)):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                names |= _names(inner, prefix=prefix if unnamed else f"{name}.")
    return names
