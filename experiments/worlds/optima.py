"""The exact optimum of E[r] - β·KL over enumerated responses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


class Optimum(NamedTuple):
    """The optimal policy at one β."""

    log_policy: Float64  # [256], log π*(y), nats
    value: float  # J(π*) = β log E_ref[exp(r/β)], reward units


class Frontier(NamedTuple):
    """The largest expected reward at each KL; no policy lies above it."""

    kl: Float64  # [N], KL(π* ‖ π_ref), nats, rising as β falls
    reward: Float64  # [N], E_π*[r], reward units, rising and concave in kl


def divergence(log_p: Float64, log_q: Float64) -> float:
    """KL(p ‖ q) = Σ p·(log p - log q), nats."""
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def expected_reward(log_policy: Float64, rewards: Float64) -> float:
    """E_π[r], reward units."""
    return float(np.exp(log_policy) @ rewards)


def optimum(log_ref: Float64, rewards: Float64, *, beta: float) -> Optimum:
    """π* ∝ π_ref·exp(r/β) and J(π*).

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2; Korbak et al. 2022,
    arXiv:2205.11275, eq. 3.
    """
    tilted = log_ref + rewards / beta
    log_partition = np.logaddexp.reduce(tilted)
    return Optimum(tilted - log_partition, float(beta * log_partition))
