"""Removes from a config the options on which no compiled program depends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from rlhf_jax.runs.run_config import RunConfig

Config = TypeVar("Config", bound=RunConfig)


def without_place(config: Config) -> Config:
    """The config with default values for the options of `RunConfig` and no folder."""
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(RunConfig)
    }
    return dataclasses.replace(config, **defaults | {"out": Path()})
