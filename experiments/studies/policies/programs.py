"""What of a config no compiled program depends on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from rlhf_jax.runs.run_config import RunConfig

Config = TypeVar("Config", bound=RunConfig)


def without_place(config: Config) -> Config:
    """A config with the defaults of every run: no seed, folder or logger of its own."""
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(RunConfig)
    }
    return dataclasses.replace(config, **defaults | {"out": Path()})
