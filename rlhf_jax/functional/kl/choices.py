"""The choices that make a KL penalty, checked, and the gradient that they have."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import estimators, gradients
from rlhf_jax.functional.kl.gradients import Estimator


@dataclasses.dataclass(frozen=True)
class Penalty:
    """By default the estimate k1 per token in the reward, as in Ziegler et al. 2019."""

    value_estimator: Estimator = "k1"
    """The number that is penalised in the reward, and shown for the loss."""
    grad_estimator: Estimator | None = None
    """What the loss differentiates; None is value_estimator."""
    placement: Literal["reward", "loss", "both"] | None = "reward"
    """Where the penalty acts; None measures it and leaves the policy alone."""
    direction: estimators.Direction = "reverse"
    """reverse is KL(policy, reference), forward is KL(reference, policy)."""
    per: Literal["token", "response", "length"] = "token"
    """An estimate of each token; one of the whole response, on its last token; or each
    token's, divided by the length of its response."""
    importance_weights: Literal["token", "prefix"] | None = None
    """Weights for samples of another policy than the one the KL is about: of the token
    alone, or of everything up to it (per response: of the whole response)."""
    clip: float | None = None
    """Largest size of one estimate, its weight included, in nats; None is no limit."""
    top_k: int | None = None
    """Exact KL over the policy's so many likeliest words and one bucket of all others;
    None is over every word."""

    def __post_init__(self) -> None:
        self._check_names()
        if self.grad_estimator is not None and not self.in_loss:
            raise InputError(
                f"grad_estimator: expected None where nothing is in the loss "
                f"(placement {self.placement}), got {self.grad_estimator}; choose "
                f"placement loss or both, or leave it out"
            )
        if self.clip is not None:
            checks.positive(clip=self.clip)
        if self.top_k is not None and (self.top_k < 1 or not self.needs_logits):
            raise InputError(
                f"top_k: expected 1 word or more, and an exact estimator, got "
                f"{self.top_k} with {' and '.join(self.estimators_used)}; choose "
                f"value_estimator exact, or leave top_k out"
            )
        self._check_weights()

    def _check_names(self) -> None:
        for name, value, known in (
            ("value_estimator", self.value_estimator, get_args(Estimator)),
            ("grad_estimator", self.grad_estimator, (None, *get_args(Estimator))),
            ("placement", self.placement, (None, "reward", "loss", "both")),
            ("direction", self.direction, get_args(estimators.Direction)),
            ("per", self.per, ("token", "response", "length")),
            ("importance_weights", self.importance_weights, (None, "token", "prefix")),
        ):
            if value not in known:
                raise InputError(
                    f"{name}: expected one of {', '.join(map(str, known))}, got "
                    f"{value!r}; choose one of them"
                )

    def _check_weights(self) -> None:
        sampled = [each for each in self.estimators_used if each != "exact"]
        if self.direction == "forward" and self.importance_weights is None and sampled:
            raise InputError(
                f"importance_weights: expected token or prefix for {sampled[0]} of a "
                f"forward KL, which is a mean over samples of the reference, got none "
                f"for samples of the policy; choose importance_weights, the exact "
                f"estimator, or direction reverse"
            )
        if self.importance_weights is None:
            return
        if self.direction == "reverse" and not self.in_loss:
            raise InputError(
                f"importance_weights: expected none where a reverse KL is only in the "
                f"reward, got {self.importance_weights}; the policy that samples is "
                f"the one that is priced there, so that each weight is 1"
            )
        if self.importance_weights == "token" and (
            self.per == "response" or not sampled
        ):
            what = "one response" if self.per == "response" else "an exact estimator"
            raise InputError(
                f"importance_weights: expected prefix or none for {what}, got token; a "
                f"token's own weight says nothing about what stands before it"
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
        """True if the exact KL is wanted somewhere: log-probs alone do not do."""
        return "exact" in self.estimators_used

    @property
    def reward_needs_logits(self) -> bool:
        """True if `reward_kl` takes the exact KL."""
        return self.value_estimator == "exact"

    @property
    def loss_needs_logits(self) -> bool:
        """True if `kl_loss` takes the exact KL, and the update so the reference."""
        return self.in_loss and self.needs_logits

    @property
    def estimators_used(self) -> tuple[Estimator, ...]:
        """The value's estimator and that of the gradient, once where they are one."""
        both = (self.value_estimator, self.in_gradient)
        return both[:1] if both[0] == both[1] else both

    @property
    def terms(self) -> dict[str, int]:
        """The expected gradient as a sum, {name: how many of it}; {} is zero."""
        return gradients.terms(
            in_reward=self.value_estimator if self.in_reward else None,
            in_loss=self.in_gradient if self.in_loss else None,
            direction=self.direction,
            per_response=self.per == "response",
            importance_weights=self.importance_weights,
            top_k=self.top_k is not None,
        )

    @property
    def gradient(self) -> str:
        """The name of the expected gradient on-policy, as `gradients` has it.

        With weights "prefix" it is that on samples of an older policy too. With "token"
        a fixed-state gradient is at the older policy's prefixes. Where responses differ
        in length it is that of aggregation "constant", and of no other.
        """
        if self.placement is None:
            return "none"
        name = gradients.name(self.terms)
        if self.per == "length":
            name += ", each response's divided by its length"
        return name

    @property
    def warning(self) -> str | None:
        """What to say, once, where this gradient is that of no KL; None where it is."""
        if self.placement is None:
            return None
        if gradients.is_kl(self.terms) and self.per != "length":
            return None
        places = [f"{self.value_estimator} in the reward"] if self.in_reward else []
        places += [f"{self.in_gradient} in the loss"] if self.in_loss else []
        what = f"{' and '.join(places)}, {self.direction}, per {self.per}"
        if not self.terms and self.per != "length":
            return (
                f"KL penalty ({what}): its expected gradient is zero, so that it does "
                f"not hold the policy; choose k2 in the loss, or k1 in the reward"
            )
        return (
            f"KL penalty ({what}): its expected gradient is that of no KL, it is "
            f"{self.gradient}; k1 in the reward gives full reverse"
        )


IN_REWARD = Penalty()
IN_LOSS = Penalty(grad_estimator="k2", placement="loss")
