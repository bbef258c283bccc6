"""Reads recorded options as `--config RUN/config.json` does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_jax.runs import command_line, run_config


def config(config_class: Any, fields: Mapping[str, Any], *, source: Path) -> Any:
    """The config of a command line with the fields of a config.json."""
    words = run_config.arguments(config_class, fields, source=source)
    return command_line.parse(config_class, description="", argv=words)
