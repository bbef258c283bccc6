"""Nash-MD: a policy that is preferred to a mixture of itself and the reference.

    rlhf-jax nash-md --model MODEL --prompts train.jsonl \\
        --reward-model runs/rm/model --out OUT

To each prompt the policy draws one response, and the mixture of policy and reference
another. The policy maximises the probability that its response is preferred, less
--kl-coef times the KL. Only the options of the method differ from `rlhf-jax grpo`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, ClassVar

from rlhf_jax.algorithms.nash_md import NashMD, NashMDRecipe
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train import commands
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig

RECIPE = NashMDRecipe(temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax nash-md`, which trains on half of each batch."""

    name: ClassVar[str] = "nash-md"
    makes: ClassVar[type[PolicyGradient]] = NashMD
    mixes_reference: ClassVar[bool] = True
    method: Annotated[NashMDRecipe, FLAT] = RECIPE
    """Coefficients and choices of Nash-MD."""

    def __post_init__(self) -> None:
        # First: a later check would name groups, which the command does not have.
        if self.batch.batch_size % 2:
            raise InputError(
                f"--batch-size: expected an even number, for a response of the policy "
                f"and one of the mixture to each prompt, got {self.batch.batch_size}; "
                f"change it"
            )
        super().__post_init__()

    @property
    def sampler_tolerance(self) -> float:
        """Tolerance added for rounded sampler and reference, nats per token."""
        return super().sampler_tolerance + self.storage_tolerance


command = functools.partial(
    commands.run, Config, description=__doc__, first=("method.mixture",)
)
"""`rlhf-jax nash-md`: runs the command from a command line."""
