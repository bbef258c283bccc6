"""The record of a library's KL penalty, and its audit.

Each program of this folder runs in its library's environment as

    PYTHON NAME_losses.py OUT.json

A mean over the tokens of a batch divides by a count that hardly varies in a large
batch. Wherever the library takes the count as an argument it is the constant
`NUM_TOKENS` here.
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
    option: str  # as users of the library write it
    coefficient: str  # β: the default, and the values in the library's recipes
    where: str  # file:line of the default and of the formula
    loss: audit.Loss  # with β = 1
    by: str = THEIRS  # or FORMULA: our implementation of the published formula


def version(distribution: str) -> str:
    """The version of an installed distribution."""
    return metadata.version(distribution)


def lines(*places: tuple[str, str]) -> str:
    """FILE:LINE of each (file of an installed package, text of one of its lines).

    Raises:
      ValueError: the text is not on exactly one line, as in another version.
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
        # Per token: each token has the weight 1 / NUM_TOKENS in the loss.
        "slopes": {
            f"{nats:g}": NUM_TOKENS * slope if math.isfinite(slope) else str(slope)
            for nats, slope in slopes.items()
        },
    }


def write(cases: Sequence[Case], arguments: Sequence[str]) -> None:
    """Audits all cases and writes the rows to the file named by the only argument."""
    [out] = arguments
    rows = [audited(case) for case in cases]
    Path(out).write_text(json.dumps(rows, allow_nan=False), encoding="utf-8")
