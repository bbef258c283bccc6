"""`--config FILE`: options from a file of TOML, YAML or JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, parsing
from rlhf_jax.runs.object_storage import urls

# Of one resume alone: a recorded run does not hand them on.
OF_ONE_RESUME = ("resume", "resume_from", "accept_lost_rows")
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def read(path: Path) -> dict[str, Any]:
    """The fields that a file names, as JSON values.

    The config.json of a run gives all of its fields, with its own folder as `out`.

    Raises:
      InputError: the file cannot be read, is of another form, or holds no fields.
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
    return parsing.read_object(
        urls.fetched(path),
        expected=f"options by their names in {path.suffix[1:]}",
        advice="name them, as in the config.json of a run",
    )
