"""Regularisers of GRPO and RLOO, in addition to `penalty` or instead of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from rlhf_jax.algorithms.policy_gradient.options import GradientPenalty, TokenChoice
from rlhf_jax.algorithms.policy_gradient.recipe import CLIP, Surrogate
from rlhf_jax.functional import checks
from rlhf_jax.roles.reference import lifecycle
from rlhf_jax.roles.reference.frozen import Frozen

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regulariser:
    """Options of `grpo.GroupRecipe` and of `rlhf-jax grpo --lifecycle.move`."""

    surrogate: Surrogate = CLIP
    """Surrogate of the policy gradient."""
    token_choice: TokenChoice | None = None
    """Tokens of a batch that the policy loss covers; None is all."""
    gradient_penalty: GradientPenalty | None = None
    """Gradient regularisation instead of the KL; None disables it."""
    kl_to_go: bool = False
    """Whether the KL in the reward is credited per token (FRPO)."""
    reference_rate: float | None = None
    """Share of the policy that is mixed into the reference after each iteration (EMA);
    None freezes the reference."""

    def __post_init__(self) -> None:
        if self.reference_rate is not None:
            checks.fraction(reference_rate=self.reference_rate)

    @property
    def of_recipe(self) -> dict[str, Any]:
        """The fields that are options of `grpo.GroupRecipe`."""
        options = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        del options["reference_rate"]
        return options

    @property
    def moving(self) -> tuple[str, ...]:
        """The parts of a stage's state that may change, for `run.Run.stage`."""
        return () if self.reference_rate is None else ("reference",)

    def moved(self, reference: Frozen, policy: Params) -> Frozen:
        """The reference after an iteration that ended with `policy`."""
        if self.reference_rate is None:
            return reference
        return _mix(reference, policy, rate=self.reference_rate)


NO_REGULARISER = Regulariser()


@functools.partial(jax.jit, static_argnames=("rate",))
def _mix(reference: Frozen, policy: Params, *, rate: float) -> Frozen:
    return lifecycle.mix(reference, policy, rate=rate)
