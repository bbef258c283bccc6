"""`--config FILE`: options from a file of TOML, YAML or JSON."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder

# Of one resume alone: a recorded run does not hand them on.
OF_ONE_RESUME = ("resume", "resume_from", "accept_lost_rows")
PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.loads,
}


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
    if path.suffix not in PARSERS:
        raise InputError(
            f"--config {path}: expected a name that ends in .toml, .yaml, .yml or "
            f".json, got {path.suffix!r}; rename it"
        )
    try:
        fields = PARSERS[path.suffix](text)
        if isinstance(fields, dict):
            return fields
        got = type(fields).__name__
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        got = str(error)
    raise InputError(
        f"--config {path}: expected options by their names in {path.suffix[1:]}, got: "
        f"{got}; name them, as in the config.json of a run"
    )
