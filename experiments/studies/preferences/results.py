"""Reads the folders that `evaluation.py` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import metrics
from studies.preferences.evaluation import REFERENCE, TEXTS

Row = dict[str, Any]


def read(study: Path) -> list[Row]:
    """Reads the evaluations of each policy and seed, the reference first.

    Returns:
      "policy", "seed" and, for each scorer, "results", its results.json, and "samples",
      the rows of its samples.jsonl.

    Raises:
      InputError: the evaluation of the reference is missing for a seed.
    """
    folder = study / "evaluation"
    evaluations = []
    for place in sorted(folder.rglob("seed_*")):
        if all((place / scorer / "summary.json").exists() for scorer in TEXTS):
            own = {
                "policy": str(place.parent.relative_to(folder)),
                "seed": int(place.name.removeprefix("seed_")),
            }
            evaluations.append(
                own | {scorer: _read(place / scorer) for scorer in TEXTS}
            )
    seeds = {one["seed"] for one in evaluations}
    known = {one["seed"] for one in evaluations if one["policy"] == REFERENCE}
    if not evaluations or seeds - known:
        raise InputError(
            f"{folder}: expected evaluations of the reference for the seeds "
            f"{sorted(seeds)}, got {sorted(known)}; start "
            f"studies.preferences.evaluation first"
        )
    return sorted(evaluations, key=lambda one: one["policy"] != REFERENCE)


def _read(place: Path) -> Row:
    figures = json.loads((place / "results.json").read_text(encoding="utf-8"))
    rows = metrics.read(place / "samples.jsonl")
    samples = [row for row in rows if row.get("stage") == "evaluate"]
    return {"results": figures, "samples": samples}


def sampled(scored: Mapping[str, Any]) -> list[Row]:
    """The policy's samples in the evaluation by one scorer, by prompt and number."""
    rows = [
        row
        for row in scored["samples"]
        if (row["model"], row["decoding"]) == ("policy", "sampled")
    ]
    return sorted(rows, key=lambda row: (row["row"], row["sample"]))
