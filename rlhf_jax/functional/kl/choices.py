"""The options of a KL penalty, their checks, and the name of their gradient.

per        column   0    1      2      3    4    a response of three tokens
token      kl       0  k(x1)  k(x2)  k(x3)  0    an estimate at each token
length     kl       0  k(x1)  k(x2)  k(x3)  0    each divided by 3, the length
response   kl       0    0      0    k(Σx)  0    one estimate, at the last token
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import refuse
from rlhf_jax.functional.kl import estimators, gradients
from rlhf_jax.functional.kl.gradients import Estimator

Tail = Literal["bucket", "sampled"]


@dataclasses.dataclass(frozen=True)
class Penalty:
    """The KL penalty; by default k1 per token in the reward (Ziegler et al. 2019)."""

    value_estimator: Estimator = "k1"
    """Estimator of the KL in the reward, and of the value that the loss reports."""
    grad_estimator: Estimator | None = None
    """Estimator that the loss differentiates; None is value_estimator."""
    placement: Literal["reward", "loss", "both"] | None = "reward"
    """Where the penalty acts: reward, loss or both; None only measures the KL."""
    direction: estimators.Direction = "reverse"
    """Direction of the KL: reverse is KL(policy ‖ reference), forward is KL(reference ‖
    policy)."""
    per: Literal["token", "response", "length"] = "token"
    """Unit of an estimate: token makes one estimate at each token; response makes one
    estimate of the whole response, at its last token; length divides the estimates at
    the tokens by the length of the response."""
    importance_weights: Literal["token", "prefix"] | None = None
    """Importance weights of estimates where another policy drew the samples: token is
    the ratio of the token, prefix the ratio of all tokens up to it (per response: of
    the whole response); None does not weight."""
    clip: float | None = None
    """Largest absolute value of one estimate, its weight included, nats; None does not
    clip."""
    top_k: int | None = None
    """Number of the policy's most likely tokens that exact KL treats one by one; None
    treats every token one by one."""
    tail: Tail = "bucket"
    """With top_k, the treatment of all other tokens: bucket merges them into one
    outcome, so that the KL is a lower bound; sampled uses the sampled token where it is
    one of them (EMA-PG), unbiased in the loss."""
    reference_share: float | None = None
    """Share α of the reference, between 0 and 1: the KL is taken to the geometric
    mixture π_ref^α·π_old^(1−α) with the policy that sampled (DAR); None takes the
    reference alone."""

    def __post_init__(self) -> None:
        self._check_names()
        checks.positive(clip=self.clip)
        checks.within(
            above=0,
            below=1,
            advice="leave it out for the reference alone",
            reference_share=self.reference_share,
        )
        refuse((*self._faults(), *self._faults_of_weights()))

    def _faults(self) -> Iterator[str]:
        if self.grad_estimator is not None and not self.in_loss:
            yield (
                f"grad_estimator: expected None where nothing is in the loss "
                f"(placement {self.placement}), got {self.grad_estimator}; choose "
                f"placement loss or both, or leave it out"
            )
        if self.top_k is not None and (self.top_k < 1 or not self.needs_logits):
            yield (
                f"top_k: expected 1 token or more, and an exact estimator, got "
                f"{self.top_k} with {' and '.join(self.estimators_used)}; choose "
                f"value_estimator exact, or leave top_k out"
            )
        if self.tail == "sampled" and not (
            self.top_k is not None
            and self.direction == "reverse"
            and self.placement == "loss"
        ):
            yield (
                f"tail: expected bucket without top_k, for a forward KL and outside of "
                f"the loss, got sampled with top_k {self.top_k}, {self.direction}, "
                f"placement {self.placement}; leave it out, or choose top_k and "
                f"placement loss"
            )
        # The mixture is not normalised. k1 and the slope of k2 then still act as a sum
        # of two KLs; k3 and exact KL need a normalised distribution.
        apt = ("k1",) if self.in_reward else ("k1", "k2")
        unapt = [name for name in self.estimators_used if name not in apt]
        if self.reference_share is not None and (
            unapt or self.direction == "forward" or self.placement in (None, "both")
        ):
            yield (
                f"reference_share: expected None except for a reverse KL with k1 in "
                f"the reward, or k1 and k2 in the loss, got {self.reference_share:g} "
                f"with {' and '.join(self.estimators_used)}, {self.direction}, "
                f"placement {self.placement}; choose another estimator, or leave it out"
            )

    def _check_names(self) -> None:
        known = get_args(Estimator)
        checks.one_of(value_estimator=self.value_estimator, among=known)
        checks.one_of(grad_estimator=self.grad_estimator, among=(None, *known))
        checks.one_of(placement=self.placement, among=(None, "reward", "loss", "both"))
        checks.one_of(direction=self.direction, among=get_args(estimators.Direction))
        checks.one_of(per=self.per, among=("token", "response", "length"))
        checks.one_of(
            importance_weights=self.importance_weights, among=(None, "token", "prefix")
        )
        checks.one_of(tail=self.tail, among=get_args(Tail))

    def _faults_of_weights(self) -> Iterator[str]:
        sampled = [name for name in self.estimators_used if name != "exact"]
        if self.direction == "forward" and self.importance_weights is None and sampled:
            yield (
                f"importance_weights: expected token or prefix for {sampled[0]} of a "
                f"forward KL, which is a mean over samples of the reference, got none "
                f"for samples of the policy; choose importance_weights, the exact "
                f"estimator, or direction reverse"
            )
        weighted = self.importance_weights is not None
        if self.direction == "reverse" and not self.in_loss and weighted:
            yield (
                f"importance_weights: expected none where a reverse KL is only in the "
                f"reward, got {self.importance_weights}; the policy that samples is "
                f"the one whose KL is penalised there, so each weight is 1"
            )
        if self.importance_weights == "token" and (
            self.per == "response" or not (sampled or self.tail == "sampled")
        ):
            what = "one response" if self.per == "response" else "an exact estimator"
            yield (
                f"importance_weights: expected prefix or none for {what}, got token; a "
                f"token's own weight does not correct the tokens before it"
            )

    @property
    def in_reward(self) -> bool:
        """True if the value is a part of the reward."""
        return self.placement in ("reward", "both")

    @property
    def in_loss(self) -> bool:
        """True if the estimate is a term of the loss."""
        return self.placement in ("loss", "both")

    @property
    def in_gradient(self) -> Estimator:
        """The estimator that the loss differentiates."""
        if self.grad_estimator is None:
            return self.value_estimator
        return self.grad_estimator

    @property
    def needs_logits(self) -> bool:
        """True if an estimator is exact, which needs the logits of both models."""
        return "exact" in self.estimators_used

    @property
    def reward_needs_logits(self) -> bool:
        """True if `reward_kl` reads the exact KL."""
        return self.value_estimator == "exact"

    @property
    def loss_needs_logits(self) -> bool:
        """True if `kl_loss` reads the exact KL: the update needs the reference."""
        return self.in_loss and self.needs_logits

    @property
    def weights_tail(self) -> bool:
        """True if token weights apply to the sampled tail alone, not to the head."""
        return self.tail == "sampled" and self.importance_weights == "token"

    @property
    def estimators_used(self) -> tuple[Estimator, ...]:
        """The distinct estimators of value and gradient, the value's first."""
        both = (self.value_estimator, self.in_gradient)
        return both[:1] if both[0] == both[1] else both

    @property
    def terms(self) -> dict[str, float]:
        """The expected gradient as a sum, {name: factor}; {} is zero.

        >>> Penalty(value_estimator="k3").terms
        {'full reverse': 1, 'fixed-state forward': -1}
        >>> Penalty(placement="loss").terms
        {}
        """
        share = self.reference_share
        of_reference = gradients.terms(
            in_reward=self.value_estimator if self.in_reward else None,
            in_loss=self.in_gradient if self.in_loss else None,
            direction=self.direction,
            per_response=self.per == "response",
            importance_weights=self.importance_weights,
            top_k=self.top_k is not None and self.tail == "bucket",
        )
        # On-policy, the mixture's KL to the policy that sampled has no gradient.
        return {
            name: times if share is None else times * share
            for name, times in of_reference.items()
        }

    @property
    def gradient(self) -> str:
        """The name of the expected gradient on-policy, as `gradients` defines it.

        With weights "prefix" the name also holds on samples of an older policy. With
        "token" a fixed-state gradient is taken at the older policy's prefixes. Where
        responses differ in length the name holds for aggregation "constant" only.

        >>> Penalty().gradient
        'full reverse'
        >>> Penalty(value_estimator="k3", placement="loss").gradient
        'fixed-state forward'
        >>> Penalty(value_estimator="exact", placement="both").gradient
        'full reverse'
        """
        if self.placement is None:
            return "none"
        name = gradients.name(self.terms)
        if self.per == "length":
            name += ", each response's divided by its length"
        return name

    @property
    def warning(self) -> str | None:
        """A warning where the expected gradient is not that of a KL; None otherwise.

        >>> print(Penalty(grad_estimator="k2", placement="loss").warning)
        None
        >>> Penalty(placement="loss").warning[:62]
        'KL penalty (k1 in the loss, reverse, per token): its expected '
        """
        if self.placement is None:
            return None
        if gradients.is_kl(self.terms) and self.per != "length":
            return None
        places = [f"{self.value_estimator} in the reward"] if self.in_reward else []
        places += [f"{self.in_gradient} in the loss"] if self.in_loss else []
        what = f"{' and '.join(places)}, {self.direction}, per {self.per}"
        if not self.terms and self.per != "length":
            return (
                f"KL penalty ({what}): its expected gradient is zero, so it does not "
                f"regularise the policy; choose k2 in the loss, or k1 in the reward"
            )
        return (
            f"KL penalty ({what}): its expected gradient is not that of a KL: it is "
            f"{self.gradient}; k1 in the reward gives full reverse"
        )


IN_REWARD = Penalty()
IN_LOSS = Penalty(grad_estimator="k2", placement="loss")
UNBIASED_K3 = Penalty(
    value_estimator="k3",
    grad_estimator="k2",
    placement="loss",
    importance_weights="token",
)
"""ρ·k3 of DeepSeek-V3.2 (2025), arXiv:2512.02556, section 3.1, with ∇ρ, ρ = π/μ.

As ∇(ρ·k3(x)) = ρ·x·∇log π, its gradient is that of k2 with the weight ρ: the reverse
KL at the prefixes of the sampler μ, however old. k3 alone has that of a forward KL.
"""
