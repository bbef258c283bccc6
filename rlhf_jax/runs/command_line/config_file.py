"""`--config FILE`: options from a file of TOML, YAML or JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, parsing
from rlhf_jax.runs.object_storage import urls

# Options of a single resume, which are not taken from a recorded config.
OF_ONE_RESUME = ("resume", "resume_from", "accept_lost_rows")
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def read(path: Path) -> dict[str, Any]:
    """Returns the fields in a file, as JSON values.

    The config.json of a run has all fields; `out` is the folder of that file.

    Raises:
      InputError: the file cannot be read or parsed, or holds no fields, or it is a
        recorded config under another name.
    """
    if path.name == folder.CONFIG:
        fields = folder.read_config(urls.fetched(path))
        fields["out"] = urls.of(path.parent) or os.fspath(path.parent)
        return {name: x for name, x in fields.items() if name not in OF_ONE_RESUME}
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"--config {path}: expected a name that ends in .toml, .yaml, .yml or "
            f".json, got {path.suffix!r}; rename it"
        )
    fields = parsing.read_object(
        urls.fetched(path),
        expected=f"options by their names in {path.suffix[1:]}",
        advice="name them, as in the config.json of a run",
    )
    if fields.keys() >= {"config", "versions"}:
        raise InputError(
            f"--config {path}: expected options by their names, got the "
            f"{folder.CONFIG} of a run under another name; give RUN/{folder.CONFIG}, "
            f'or a file with what is in its "config"'
        )
    return fields
