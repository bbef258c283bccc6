"""Nash-MD: a policy that is preferred to a mixture of itself with the reference.

    rlhf-jax nash-md --model MODEL --prompts train.jsonl \\
        --reward-model runs/rm/model --out OUT

It is `rlhf-jax grpo` with another method: to each prompt the policy gives one response
and the mixture of policy and reference another, and the policy learns what is preferred
to the mixture's, less --kl-coef times the KL.
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
    """The options of `rlhf-jax nash-md`, which trains on half of a batch."""

    name: ClassVar[str] = "nash-md"
    makes: ClassVar[type[PolicyGradient]] = NashMD
    mixes_reference: ClassVar[bool] = True
    method: Annotated[NashMDRecipe, FLAT] = RECIPE
    """Coefficients and choices of Nash-MD."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch.batch_size % 2:
            raise InputError(
                f"--batch-size: expected an even number, for a response of the policy "
                f"and one of the mixture to each prompt, got {self.batch.batch_size}; "
                f"change it"
            )

    @property
    def rows_per_prompt(self) -> int:
        """A response of the policy and one of the mixture."""
        return 2

    @property
    def sampler_tolerance(self) -> float:
        """What rounding of sampler and reference adds to the distance to the trainer.

        Nats per token.
        """
        return super().sampler_tolerance + self.storage_tolerance

    @property
    def trained_share(self) -> float:
        """The policy's own responses, not the mixture's."""
        return 0.5


command = functools.partial(
    commands.run, Config, description=__doc__, first=("method.mixture",)
)
"""`rlhf-jax nash-md`: from a command line to a run."""
