"""The expected gradient of every KL penalty, by name.

The value of an estimator does not determine its gradient. On-policy, with weights of 1,
before clipping, at lam = 1, without whitening and for a *sum* over each response, the
expected gradients of a reverse penalty, KL(π ‖ π_ref), are

                              in the loss             in the reward
    k1, token or response     zero                    full reverse
    k2, token                 fixed-state reverse     mean k2 less that
    k2, response              full reverse            mean k2 less that
    k3, token                 fixed-state forward     full reverse less that
    k3, response              full forward            full reverse less that
    exact                     fixed-state reverse     full reverse less that

"less that" subtracts the gradient in the loss. "full" is the gradient of the KL of
sequence distributions. "fixed-state" is Σ_t E_prefix ∇KL at that prefix: it does not
include how the policy changes the prefixes that it visits. "mean k2" is ∇E_π[k2].

∇E_π[k] has two parts: one through ∇log π, which the reward gives, and one through k,
which the loss gives. So an estimate that is unbiased for every policy (k1, k3, exact)
has the full gradient where it is in both places, or where the loss has another estimate
with the same gradient.

A forward penalty, KL(π_ref ‖ π), uses samples of π with importance weights π_ref/π:

                              in the loss, weights of
                              the token               the prefix, or the response
    k1, k3, exact             fixed-state forward     full forward
    k2                        fixed-state k2          reference's mean k2

Here k2 is ½ E_ref[x²], at a prefix or over the responses of the reference: it is not a
KL. Exact KL needs no weights. Without them it is fixed-state forward at the policy's
prefixes; in reward and loss together it is "own-prefix forward", ∇E_π Σ_t KL_t(π_ref ‖
π). A weighted forward estimate in the reward has the gradient "score half of weighted
k", E_π[w·k·∇log π], which is not that of a KL.

A loss is a sum over each response, divided by a constant, under aggregation "constant"
(`functional.aggregation`) or where all responses have one length. Where lengths differ,
token_mean and sequence_mean divide by lengths that the policy chooses, and the names
hold only approximately: k1 in the loss is then not zero, and k1 in the reward is not
full reverse.

Exact KL over a top k and one bucket has the same gradients, for the KL of the bucketed
distributions ("top-k full reverse"). In the loss with a sampled tail, it has the
gradient of exact KL over all tokens.

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
    """The expected gradient as a sum, {name: factor}; {} is zero.

    Args:
      in_reward, in_loss: the estimators in reward and loss; None uses no estimator.
      per_response: True where one estimate is made of a whole response.
      importance_weights: "token" weights an estimate by its own token, "prefix" by all
        tokens up to it; None uses no weights.
      top_k: True where exact is over a top k and one bucket.

    >>> choice = {"direction": "reverse", "per_response": False}
    >>> choice |= {"importance_weights": None, "top_k": False}
    >>> terms(in_reward="k1", in_loss=None, **choice)
    {'full reverse': 1}
    >>> terms(in_reward=None, in_loss="k1", **choice)
    {}
    >>> terms(in_reward="k3", in_loss=None, **choice)
    {'full reverse': 1, 'fixed-state forward': -1}
    """

    def of_loss(estimator: Estimator) -> dict[str, int]:
        kind = TOP_K if top_k and estimator == "exact" else ""
        if direction == "forward":
            # Weights of the whole prefix turn it into a sample of the reference.
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


def name(terms: Mapping[str, float]) -> str:
    """Writes the sum in words.

    >>> name({"full reverse": 1, "fixed-state forward": -1})
    'full reverse - fixed-state forward'
    >>> name({})
    'zero'
    """
    signed = []
    for gradient, times in sorted(terms.items(), key=lambda term: -term[1]):
        factor = "" if abs(times) == 1 else f"{abs(times):g} × "
        signed.append(f"{'-' if times < 0 else '+'} {factor}{gradient}")
    return " ".join(signed).removeprefix("+ ") or "zero"


def is_kl(terms: Mapping[str, float]) -> bool:
    """Whether the sum is the gradient of one KL, or a positive multiple of it.

    >>> is_kl({"full reverse": 1})
    True
    >>> is_kl({"full reverse": 1, "fixed-state forward": -1})
    False
    """
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
