"""The choices of estimator, placement and direction with different gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rlhf_jax.functional.kl.penalty import Penalty

NONE = "none"  # without a penalty, β = 0
# Has the gradient of KL(π ‖ π_ref), as k1 in the reward, and keeps it on older samples.
WEIGHTED = "weighted k2 response"
WEIGHTED_K2 = Penalty(
    "k2", placement="loss", per="response", importance_weights="prefix"
)


def distinct() -> dict[str, Penalty]:
    """{"k1 reward": penalty}, the first choice of each expected gradient.

    Estimates are per token; sampled estimates of a forward KL have the weight of their
    token. Among choices with the same expected gradient the reverse KL, the reward and
    the simplest estimator come first: exact KL in the loss is k2 in the loss without
    noise.
    """
    chosen: dict[str, tuple[str, Penalty]] = {}
    for direction, placement, estimator in itertools.product(
        ("reverse", "forward"),
        ("reward", "loss", "both"),
        ("k1", "k2", "k3", "exact"),
    ):
        sampled_forward = direction == "forward" and estimator != "exact"
        penalty = Penalty(
            value_estimator=estimator,
            placement=placement,
            direction=direction,
            importance_weights="token" if sampled_forward else None,
        )
        prefix = "forward " if direction == "forward" else ""
        chosen.setdefault(
            penalty.gradient, (f"{prefix}{estimator} {placement}", penalty)
        )
    return dict(chosen.values())


def cell(name: str, kl_coef: float) -> str:
    """The label of a choice at a β, as in "k1_reward_0.05"."""
    return f"{name.replace(' ', '_')}_{kl_coef:g}"


def grid(kl_coefs: Sequence[float]) -> list[dict[str, Any]]:
    """The axis of a sweep: no penalty, then every choice and `WEIGHTED` at every β."""
    values = [_value(NONE, Penalty(), kl_coef=0.0)]
    for name, penalty in {**distinct(), WEIGHTED: WEIGHTED_K2}.items():
        values += [
            _value(cell(name, kl_coef), penalty, kl_coef=kl_coef)
            for kl_coef in kl_coefs
        ]
    return values


def _value(label: str, penalty: Penalty, *, kl_coef: float) -> dict[str, Any]:
    return {
        "label": label,
        "kl_coef": kl_coef,
        "penalty.value_estimator": penalty.value_estimator,
        "penalty.grad_estimator": None,
        "penalty.placement": penalty.placement,
        "penalty.direction": penalty.direction,
        "penalty.per": penalty.per,
        "penalty.importance_weights": penalty.importance_weights,
    }
