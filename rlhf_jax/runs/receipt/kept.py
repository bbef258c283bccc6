"""data.json: what was read of the data of a run, as it began."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_jax.devices import processes
from rlhf_jax.runs import folder

NAME = "data.json"


def write(run: Path, data: Mapping[str, Any]) -> None:
    """Writes data.json, unless a run that goes on has it already.

    That run's stays as it began. A line on stderr names the sources that are now read
    otherwise.
    """
    path = run / NAME
    if not processes.is_first():
        return
    if not path.exists():
        folder.write_json(path, dict(data))
        return
    began = _read(path)
    now = json.loads(json.dumps(data))
    if began == now:
        return
    before = {source["name"]: source for source in began.get("sources", [])}
    names = [
        source["name"]
        for source in now["sources"]
        if before.get(source["name"]) != source
    ]
    print(
        f"warning: {path} says how this run began, and {', '.join(names) or 'its data'}"
        f" is read otherwise now",
        file=sys.stderr,
    )


def _read(path: Path) -> dict[str, Any]:
    """What data.json holds; nothing where it is not what a run writes."""
    try:
        began = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return began if isinstance(began, dict) else {}
