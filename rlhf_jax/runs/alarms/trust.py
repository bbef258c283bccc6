"""Alarms about the sampler's log-probs, from the ledger of every step.

`flow.ledger` defines the metrics, and says why a correct sampler keeps them in bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_jax.runs.alarms import history
from rlhf_jax.runs.alarms.history import Row

if TYPE_CHECKING:
    from rlhf_jax.runs.alarms.rules import Limits

PARTS = "trust/distance_"
LEAST_DISTANCE = 1e-4  # nats per token: float32 rounding between decoder and trainer
# Rounding errors that raise no alarm, though enough tokens make their z-scores large.
WEIGHT_TOLERANCE = 0.05
ENTROPY_TOLERANCE = 0.05
DUPLICATES_TOLERANCE = 0.02


def messages(rows: Sequence[Row], *, limits: Limits) -> dict[str, str]:
    """Returns {alarm: message} after the last row; "" raises no alarm."""
    return {
        "trust_distance": _distance(rows, limits) or _distance_of_parts(rows, limits),
        "trust_outliers": _outliers(rows, limits),
        "trust_weight": _weight(rows, limits),
        "trust_entropy": _entropy(rows, limits),
        "trust_duplicates": _duplicates(rows, limits),
        "trust_age": _age(rows, limits),
    }


def _distance(rows: Sequence[Row], limits: Limits) -> str:
    latest = _newest(rows, "trust/distance")
    if latest is None:
        return ""
    bounds = []
    if limits.trust_distance is not None:
        bounds.append((limits.trust_distance, f"{limits.trust_distance:g}"))
    if limits.trust_growth is not None:
        (at_first,) = history.first(rows, "trust/distance", 1)
        bound = limits.trust_growth * max(at_first, LEAST_DISTANCE)
        text = f"{bound:.2g}, {limits.trust_growth:g} times what it was at first"
        bounds.append((bound, text))
    if not bounds or not latest > min(bounds)[0]:
        return ""
    return (
        f"the sampler's log-probs are {latest:.3g} nats per token from the trainer's, "
        f"over {min(bounds)[1]}"
    )


def _distance_of_parts(rows: Sequence[Row], limits: Limits) -> str:
    """Judges the mean over a window, since some positions have few tokens."""
    if limits.trust_distance is None:
        return ""
    for name in sorted(name for name in rows[-1] if name.startswith(PARTS)):
        mean = history.windowed(rows, name, limits.window)
        if mean is not None and mean > limits.trust_distance:
            _, part, number = name.split("_")
            of = "the response" if part == "position" else "the lengths of prompts"
            return (
                f"in quarter {number} of {of} the sampler's log-probs are {mean:.3g} "
                f"nats per token from the trainer's, over {limits.trust_distance:g}"
            )
    return ""


def _outliers(rows: Sequence[Row], limits: Limits) -> str:
    share = history.windowed(rows, "trust/outliers", limits.window)
    if share is None or limits.trust_outliers is None:
        return ""
    if not share > limits.trust_outliers:
        return ""
    return (
        f"the log-probs of {share:.2%} of the tokens differ by more than 1 nat, over "
        f"{limits.trust_outliers:.2%}"
    )


def _weight(rows: Sequence[Row], limits: Limits) -> str:
    for steps, z in _pooled(rows, "trust/weight_z", limits):
        mean = history.mean(history.last(rows, "trust/weight", steps))
        if abs(mean - 1) > WEIGHT_TOLERANCE:
            return (
                f"tokens are {mean:.3g} times as likely to the trainer as the sampler "
                f"says, where 1 is expected ({abs(z):.1f} standard deviations over "
                f"{_steps(steps)})"
            )
    return ""


def _entropy(rows: Sequence[Row], limits: Limits) -> str:
    for steps, z in _pooled(rows, "trust/entropy_z", limits):
        mean = history.mean(history.last(rows, "trust/entropy_ratio", steps))
        if z < 0 and mean < 1 - ENTROPY_TOLERANCE:
            return (
                f"-log π of the sampler's tokens is {mean:.3g} of the trainer's "
                f"entropy ({-z:.1f} standard deviations over {_steps(steps)})"
            )
    return ""


def _duplicates(rows: Sequence[Row], limits: Limits) -> str:
    for steps, z in _pooled(rows, "trust/duplicates_z", limits):
        share, expected = (
            history.mean(history.last(rows, name, steps))
            for name in ("trust/duplicates", "trust/duplicates_expected")
        )
        if share > expected + DUPLICATES_TOLERANCE:
            return (
                f"{share:.1%} of the responses repeat that of the row before, to the "
                f"same prompt, where {expected:.1%} are expected ({z:.1f} standard "
                f"deviations over {_steps(steps)})"
            )
    return ""


def _age(rows: Sequence[Row], limits: Limits) -> str:
    oldest = _newest(rows, "trust/age_max")
    if limits.trust_age is None or oldest is None or not oldest > limits.trust_age:
        return ""
    return (
        f"tokens were drawn by parameters {oldest:g} iterations old, over "
        f"{limits.trust_age}"
    )


def _pooled(rows: Sequence[Row], name: str, limits: Limits) -> list[tuple[int, float]]:
    """(n, z) for each n such that the last n steps' pooled z-score z exceeds the limit.

    The pooled z-score of n independent steps is their sum over √n.
    """
    if limits.trust_z is None:
        return []
    sums = itertools.accumulate(history.last(rows, name, limits.window))
    pooled = [(n, total / math.sqrt(n)) for n, total in enumerate(sums, start=1)]
    return [(n, z) for n, z in pooled if abs(z) > limits.trust_z]


def _newest(rows: Sequence[Row], name: str) -> float | None:
    values = history.last(rows[-1:], name, 1)
    return values[0] if values else None


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"
