"""What is written down of a library's KL penalty, and how it is found.

Each program of this folder is run in its library's environment as

    PYTHON NAME_losses.py OUT.json

A mean over a batch's tokens divides by a count that hardly varies in a large batch. So
it is a constant here, `NUM_TOKENS`, wherever the library takes the count as an
argument.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_jax import audit
from rlhf_jax.audit.worlds import GROUP, LENGTH

WORLDS = ("fixed length", "stop token", "stale sampler")
NUM_TOKENS = GROUP * LENGTH
THEIRS, FORMULA = "their code", "formula"


class Case(NamedTuple):
    """A penalty of a library."""

    library: str
    version: str
    option: str  # as its users write it
    coefficient: str  # β: its default, and what the library's own recipes set
    where: str  # file:line, of the default and of the formula
    loss: audit.Loss  # with β = 1
    by: str = THEIRS  # or FORMULA: a loss of ours with the published formula


def version(distribution: str) -> str:
    """Of an installed package."""
    return metadata.version(distribution)


def lines(*places: tuple[str, str]) -> str:
    """FILE:LINE of each (file of an installed package, text of one of its lines).

    Raises:
      ValueError: not one line has it, as in another version.
    """
    lines = []
    for file, text in places:
        package, _, rest = file.partition("/")
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        source = Path(spec.submodule_search_locations[0], rest).read_text("utf-8")
        numbers = [n for n, line in enumerate(source.splitlines(), 1) if text in line]
        if len(numbers) != 1:
            raise ValueError(
                f"{file}: expected one line with {text!r}, got {len(numbers)}; "
                f"read how this version computes it"
            )
        lines.append(f"{file}:{numbers[0]}")
    return ", ".join(lines)


def audited(case: Case, worlds: Sequence[str] = WORLDS) -> dict[str, Any]:
    """All figures of a case, as JSON."""
    findings = {}
    for world in audit.every():
        if world.name in worlds:
            gradient = audit.expected_gradient(case.loss, world)
            finding = audit.of_gradient(gradient, world=world)
            nearest = finding.fits[finding.nearest]
            findings[world.name] = {
                "verdict": finding.verdict,
                "norm": finding.norm,
                "nearest": finding.nearest,
                "scale": nearest.scale,
                "distance": nearest.distance,
                "by_depth": finding.by_depth,
            }
    slopes = audit.by_log_ratio(case.loss)["reference"]
    return {
        **{name: value for name, value in case._asdict().items() if name != "loss"},
        "worlds": findings,
        "by_length": audit.by_length(case.loss),
        # Of a token, where each has the weight 1 / NUM_TOKENS.
        "slopes": {
            f"{nats:g}": NUM_TOKENS * slope if math.isfinite(slope) else str(slope)
            for nats, slope in slopes.items()
        },
    }


def write(cases: Sequence[Case], arguments: Sequence[str]) -> None:
    """Audits all of them into the file that the one argument names."""
    [out] = arguments
    rows = [audited(case) for case in cases]
    Path(out).write_text(json.dumps(rows, allow_nan=False), encoding="utf-8")
