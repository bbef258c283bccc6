"""--max-staleness: how much older than the trainer the policy that samples may be."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

import jax

from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.sampling.options import SamplerConfig

WEIGHT_CAP = 2.0
Recipe = TypeVar("Recipe", bound=PolicyRecipe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessConfig(SamplerConfig):
    """Options of how old the policy is that samples."""

    max_staleness: int | None = None
    """Iterations k that the sampler may be behind: the responses of step s are drawn by
    the policy of step max(0, s - k), k batches ahead, while others are learned from. 0
    is on-policy; None is 1 with --placement.sampler last, else 0. On the policy's own
    devices each batch under way takes a copy of the parameters."""
    staleness_weight_cap: float | None = WEIGHT_CAP
    """With --max-staleness above 0 and without --sampler-weight-cap: cap of the
    importance weights that correct for the older sampler (token_truncate, with
    recomputed log-probs); None leaves the ratio to the sampler's log-probs alone."""

    def staleness_by_default(self) -> int:
        """k where --max-staleness is not given."""
        return 0

    @property
    def staleness(self) -> int:
        """k, the iterations that the sampler is behind."""
        if self.max_staleness is None:
            return self.staleness_by_default()
        return self.max_staleness

    def check_staleness(self, recipe: PolicyRecipe, *, num_steps: int) -> None:
        """Raises InputError for a staleness that other options rule out.

        Args:
          recipe: as the command line has it.
          num_steps: of the run.
        """
        if self.max_staleness is not None:
            checks.non_negative(max_staleness=self.max_staleness)
            if self.max_staleness > max(0, num_steps - 1):
                raise InputError(
                    f"--max-staleness: expected less than the {num_steps} of "
                    f"--num-steps, as no policy is older than the first, got "
                    f"{self.max_staleness}; lower it"
                )
        cap = self.staleness_weight_cap
        if cap != WEIGHT_CAP and (not self.max_staleness or self._corrects(recipe)):
            raise InputError(
                f"--staleness-weight-cap: expected --max-staleness above 0 with it, "
                f"and no --sampler-weight-cap, got {cap}; leave it out"
            )
        if cap is not None and not 1 <= cap < math.inf:
            raise InputError(
                f"--staleness-weight-cap: expected a finite number of at least 1, got "
                f"{cap}; choose another, or None"
            )
        corrected = self.corrected(recipe)
        if (
            self.staleness
            and corrected.recompute_logprobs
            and corrected.sampler_weight_cap is None
        ):
            raise InputError(
                "--recompute-logprobs: expected --sampler-weight-cap with it where the "
                "sampler is behind (--max-staleness, or --placement.sampler last), as "
                "it would take the older policy that sampled for this one; give the "
                "cap (2 is usual), or leave it out"
            )

    def corrected(self, recipe: Recipe) -> Recipe:
        """The recipe with the correction that --max-staleness asks for by default.

        Args:
          recipe: as the command line has it; its own --sampler-weight-cap stays.
        """
        cap = self.staleness_weight_cap
        if not self.max_staleness or cap is None or self._corrects(recipe):
            return recipe
        return dataclasses.replace(
            recipe, recompute_logprobs=True, sampler_weight_cap=cap
        )

    @staticmethod
    def _corrects(recipe: PolicyRecipe) -> bool:
        return recipe.sampler_weight_cap is not None


def refuse_processes(staleness: int) -> None:
    """Raises InputError for a queue of several processes.

    Args:
      staleness: k.
    """
    if staleness and jax.process_count() > 1:
        raise InputError(
            f"--max-staleness: expected 0 with several processes, whose samplers would "
            f"not start their programs in one order, got {staleness}; leave it out, or "
            f"leave out --coordinator"
        )
