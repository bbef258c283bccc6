"""What the expected gradient of a KL penalty is, by name.

The value of an estimator says nothing about its gradient. On-policy, with weights of 1,
before clipping, at lam = 1, without whitening and as a *sum* over each response it is
(reverse is KL(π ‖ π_ref)):

                              in the loss             in the reward
    k1, token or response     zero                    full reverse
    k2, token                 fixed-state reverse     mean k2 less that
    k2, response              full reverse            mean k2 less that
    k3, token                 fixed-state forward     full reverse less that
    k3, response              full forward            full reverse less that
    exact                     fixed-state reverse     full reverse less that

"full" is the gradient of the KL of sequence distributions; "fixed-state" is
Σ_t E_prefix ∇KL at that prefix, which misses how the policy's choices change the
prefixes that it visits; "mean k2" is ∇E_π[k2]. ∇E_π[k] always has two parts, one
through ∇log π, which is the reward's, and one through k, which is the loss's. So an
estimate that is unbiased for every policy (k1, k3, exact) has the full gradient where
the same one, or another of the same gradient, stands in both places.

A forward KL, KL(π_ref ‖ π), from samples of π that carry weights π_ref/π:

                              in the loss, weights of
                              the token               all up to it, or the response
    k1, k3, exact             fixed-state forward     full forward
    k2                        fixed-state k2          reference's mean k2

The k2 are ½ E_ref[x²], given the prefix or over the reference's own: no KL. Exact needs
no weights: without them it is fixed-state forward at the policy's prefixes, and both in
reward and loss "own-prefix forward", ∇E_π Σ_t KL_t(π_ref ‖ π). In the reward a weighted
forward estimate is "score half of weighted k", E_π[w·k·∇log π], no KL's.

A loss is such a sum, over a constant, with aggregation "constant" (`aggregation.py`),
or where all responses are as long as each other. Where they differ, token_mean and
sequence_mean divide by lengths that the policy chooses, and none of these names holds
to the letter: under them k1 in the loss is not zero, and k1 in the reward is not full
reverse.

Exact KL over a top k and one bucket has the same gradients, of the KL of what is left
("top-k full reverse").

Source: Tang and Munos 2025, arXiv:2506.09477, and Liu et al. 2025, arXiv:2510.01555.
The tests check every row by enumeration, with and without a stop token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlhf_jax.functional.kl import estimators

Estimator = Literal["k1", "k2", "k3", "exact"]

FULL_REVERSE = "full reverse"
FULL_FORWARD = "full forward"
FIXED_REVERSE = "fixed-state reverse"
FIXED_FORWARD = "fixed-state forward"
OWN_PREFIX_FORWARD = "own-prefix forward"
MEAN_K2 = "mean k2"
REFERENCE_MEAN_K2 = "reference's mean k2"
FIXED_K2 = "fixed-state k2"
TOP_K = "top-k "  # before a name
SCORE_HALF = "score half of weighted "  # before an estimator

_KLS = (FULL_REVERSE, FULL_FORWARD, FIXED_REVERSE, FIXED_FORWARD)


def terms(
    *,
    in_reward: Estimator | None,
    in_loss: Estimator | None,
    direction: estimators.Direction,
    per_response: bool,
    importance_weights: Literal["token", "prefix"] | None,
    top_k: bool,
) -> dict[str, int]:
    """The gradient as a sum: {name: how many of it}; {} is zero.

    Args:
      in_reward, in_loss: the estimators there; None is nothing.
      direction: "reverse" or "forward".
      per_response: True where an estimate is of a whole response.
      importance_weights: of the token, or of everything up to it.
      top_k: True where exact is over a top k and one bucket.
    """

    def of_loss(estimator: Estimator) -> dict[str, int]:
        kind = TOP_K if top_k and estimator == "exact" else ""
        if direction == "forward":
            # Where all before a token is weighted, prefixes are the reference's.
            full = importance_weights == "prefix"
            if estimator == "k2":
                return {REFERENCE_MEAN_K2 if full else FIXED_K2: 1}
            return {kind + (FULL_FORWARD if full else FIXED_FORWARD): 1}
        match estimator:
            case "k1":
                return {}
            case "k2":
                return {FULL_REVERSE if per_response else FIXED_REVERSE: 1}
            case "k3":
                return {FULL_FORWARD if per_response else FIXED_FORWARD: 1}
            case "exact":
                return {kind + FIXED_REVERSE: 1}

    def of_reward(estimator: Estimator) -> dict[str, int]:
        kind = TOP_K if top_k and estimator == "exact" else ""
        if direction == "forward" and importance_weights is not None:
            return {f"{SCORE_HALF}{kind}{estimator}": 1}
        if direction == "forward":
            whole = OWN_PREFIX_FORWARD
        else:
            whole = MEAN_K2 if estimator == "k2" else FULL_REVERSE
        return _sum({kind + whole: 1}, of_loss(estimator), sign=-1)

    return _sum(
        {} if in_reward is None else of_reward(in_reward),
        {} if in_loss is None else of_loss(in_loss),
    )


def name(terms: Mapping[str, int]) -> str:
    """The sum in words, "zero" where it is empty."""
    signed = []
    for gradient, times in sorted(terms.items(), key=lambda term: -term[1]):
        factor = "" if abs(times) == 1 else f"{abs(times)} × "
        signed.append(f"{'-' if times < 0 else '+'} {factor}{gradient}")
    return " ".join(signed).removeprefix("+ ") or "zero"


def is_kl(terms: Mapping[str, int]) -> bool:
    """True if the sum is one KL's gradient, or a multiple of it."""
    return len(terms) == 1 and all(
        times > 0 and gradient.removeprefix(TOP_K) in _KLS
        for gradient, times in terms.items()
    )


def _sum(
    left: Mapping[str, int], right: Mapping[str, int], *, sign: int = 1
) -> dict[str, int]:
    total = dict(left)
    for gradient, times in right.items():
        total[gradient] = total.get(gradient, 0) + sign * times
    return {gradient: times for gradient, times in total.items() if times != 0}
