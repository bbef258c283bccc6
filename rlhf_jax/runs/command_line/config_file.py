"""`--config FILE`: options from a file of TOML, YAML or JSON."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import yaml

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder

# Of one resume alone: a recorded run does not hand them on.
OF_ONE_RESUME = ("resume", "resume_from", "accept_lost_rows")


def read(path: Path) -> dict[str, Any]:
    """The fields that a file names, as JSON values.

    The config.json of a run gives all of its fields, with its own folder as `out`.

    Raises:
      InputError: the file cannot be read, is of another form, or holds no fields.
    """
    if path.name == folder.CONFIG:
        fields = folder.read_config(path) | {"out": os.fspath(path.parent)}
        return {name: x for name, x in fields.items() if name not in OF_ONE_RESUME}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--config {path} cannot be read: {why}") from error
    try:
        match path.suffix:
            case ".toml":
                fields = tomllib.loads(text)
            case ".yaml" | ".yml":
                fields = yaml.safe_load(text)
            case ".json":
                fields = json.loads(text)
            case _:
                raise InputError(
                    f"--config {path}: expected a name that ends in .toml, .yaml, .yml "
                    f"or .json, got {path.suffix!r}; rename it"
                )
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise InputError(
            f"--config {path}: expected {path.suffix[1:]}, got: {error}"
        ) from error
    if not isinstance(fields, dict):
        raise InputError(
            f"--config {path}: expected options by their names, got "
            f"{type(fields).__name__}; write for example seed = 1"
        )
    return fields
