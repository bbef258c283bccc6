"""Oracles of the metrics of an iteration other than losses, in float64.

Like `oracles`, this file never imports jax and uses nothing of the package: each number
follows the glossary of rlhf_jax/runs/README.md. Tables are log-probs f64[B, S, V] of
the token in a column, as in `oracle_updates`.
"""

from __future__ import annotations

import math

import numpy as np
import oracles
from oracle_updates import Rows, Table, picked

Array = np.ndarray


def of_responses(rows: Rows, *, old: Array, ref: Array, entropy: Array) -> dict:
    """`objective/` and `response/`, from old and reference log-probs, nats."""
    size = len(rows.tokens)
    log_ratios = {
        b: [old[b, t] - ref[b, t] for t in rows.columns(b)] for b in _all(rows)
    }
    columns = oracles.entries(rows.response_mask)
    texts = [tuple(rows.tokens[b, rows.columns(b)]) for b in _all(rows)]
    return {
        "objective/scores": math.fsum(rows.scores) / size,
        "objective/kl": math.fsum(map(math.fsum, log_ratios.values())) / size,
        "objective/kl_k3": math.fsum(
            math.exp(-x) - 1 + x for of_row in log_ratios.values() for x in of_row
        )
        / size,
        "objective/ref_nll": -math.fsum(ref[cell] for cell in columns) / len(columns),
        "objective/entropy": math.fsum(entropy[c] for c in columns) / len(columns),
        "response/length": len(columns) / size,
        "response/eos_fraction": sum(rows.finished) / size,
        "response/distinct_fraction": len({*texts}) / size,
    }


def of_groups(
    rows: Rows, rewards: Array, *, counted: list[bool], trained: list[bool] | None
) -> dict:
    """`group/`, and `response/masked` if rows may be left out of the loss.

    Args:
      rewards: token rewards, including the KL penalty.
      counted: rows that a group compares.
      trained: rows in the loss; None if all are.
    """
    totals = [math.fsum(rewards[b, t] for t in rows.columns(b)) for b in _all(rows)]
    spreads, equal = [], []
    for first in range(0, len(totals), rows.group):
        members = range(first, first + rows.group)
        group = [totals[b] for b in members]
        mean = math.fsum(group) / len(group)
        squares = math.fsum((total - mean) ** 2 for total in group)
        spreads.append(math.sqrt(squares / (len(group) - 1)))
        equal.append(len({totals[b] for b in members if counted[b]}) <= 1)
    stats = {
        "group/std": math.fsum(spreads) / len(spreads),
        "group/equal_fraction": sum(equal) / len(equal),
    }
    if trained is not None:
        stats["response/masked"] = trained.count(False) / len(trained)
    return stats


def of_weights(
    rows: Rows,
    *,
    old: Array,
    behaviour: Array,
    age: Array,
    correction: tuple[str, float, float | None],
) -> dict:
    """`policy/sampler_...` and `policy/staleness...`, from importance weights."""
    cells = oracles.entries(rows.response_mask)
    name, cap, floor = correction
    weights, _ = oracles.importance_weights(
        old - behaviour, rows.response_mask, name, cap, floor
    )
    cut_at = cap if name.endswith("truncate") else 0.0
    units = [weights[cell] for cell in cells]
    if not name.startswith("token"):
        units = [weights[b, rows.columns(b)[0]] for b in _all(rows)]
    from_sampler = [behaviour[cell] - old[cell] for cell in cells]
    return {
        "policy/sampler_weight": np.mean([weights[cell] for cell in cells]),
        "policy/sampler_weight_capped": np.mean([weights[c] == cut_at for c in cells]),
        "policy/sampler_ess": oracles.effective_share(np.array(units)),
        "policy/sampler_kl": np.mean(from_sampler),
        "policy/sampler_kl_k3": np.mean([math.exp(-x) - 1 + x for x in from_sampler]),
        "policy/staleness": np.mean([age[cell] for cell in cells]),
        "policy/staleness_max": max(age[cell] for cell in cells),
    }


def of_trust(
    rows: Rows, *, behaviour: Array, policy: Table, age: Array, room: int
) -> dict:
    """`trust/`, for a sampler with log-probs `behaviour`.

    Args:
      policy: log-probs of the trainer before the update.
      room: number of response columns.
    """
    own, size = picked(policy, rows), rows.tokens.shape[1]
    before = size - room
    cells = oracles.entries(rows.response_mask)
    fresh = [cell for cell in cells if age[cell] == 0]
    gap = {cell: abs(own[cell] - behaviour[cell]) for cell in cells}

    def distance(of: list[tuple[int, ...]]) -> float:
        return math.fsum(gap[cell] for cell in of) / len(of) if of else 0.0

    stats = {
        "trust/distance": distance(fresh),
        "trust/outliers": sum(gap[cell] > 1 for cell in fresh) / len(fresh),
        "trust/age_max": max(age[cell] for cell in cells),
    }
    for quarter in range(4):
        of_columns = [c for c in fresh if (c[1] - before) * 4 // room == quarter]
        of_prompts = [
            (b, t)
            for b, t in fresh
            if (rows.mask[b, :before].sum() - 1) * 4 // before == quarter
        ]
        stats[f"trust/distance_position_{quarter + 1}"] = distance(of_columns)
        stats[f"trust/distance_prompt_{quarter + 1}"] = distance(of_prompts)
    weights = {c: min(math.exp(own[c] - behaviour[c]), 10.0) for c in cells}
    entropies = {
        cell: -math.fsum(np.exp(policy[cell]) * policy[cell]) for cell in cells
    }
    widest = math.log(policy.shape[-1])
    surprise = math.fsum(weights[c] * -own[c] for c in cells)
    expected = math.fsum(weights[c] * entropies[c] for c in cells)
    variance = math.fsum(h * max(widest - h, 1.0) for h in entropies.values())
    errors = [weight - 1 for weight in weights.values()]
    return stats | {
        "trust/weight": math.fsum(weights.values()) / len(cells),
        "trust/weight_z": _z(math.fsum(errors), math.fsum(x * x for x in errors)),
        "trust/entropy_ratio": surprise / expected,
        "trust/entropy_z": _z((surprise - expected) / widest, variance / widest**2),
        **_of_duplicates(rows, behaviour),
    }


def _of_duplicates(rows: Rows, behaviour: Array) -> dict:
    """`trust/duplicates...`, from adjacent responses to one prompt."""
    pairs = [b for b in range(len(rows.tokens) - 1) if (b + 1) % rows.group]
    texts = [tuple(rows.tokens[b, rows.columns(b)]) for b in _all(rows)]
    share = np.mean([texts[b] == texts[b + 1] for b in pairs])
    chances = [
        math.exp(math.fsum(behaviour[b, t] for t in rows.columns(b))) for b in pairs
    ]
    expected, z = np.mean(chances), 0.0
    if share > expected:
        parts = [(share, expected), (1 - share, 1 - expected)]
        z = math.sqrt(2 * len(pairs) * sum(p * math.log(p / q) for p, q in parts if p))
    return {
        "trust/duplicates": share,
        "trust/duplicates_expected": expected,
        "trust/duplicates_z": z,
    }


def _z(total: float, variance: float) -> float:
    """A z-score by Freedman's inequality, for differences of at most 1."""
    return total / math.sqrt(variance + abs(total) / 3)


def _all(rows: Rows) -> range:
    return range(len(rows.tokens))
