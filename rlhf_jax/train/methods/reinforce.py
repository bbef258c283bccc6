"""REINFORCE++ on your own model, prompts and reward.

    rlhf-jax reinforce --model MODEL --prompts train.jsonl --verifier gsm8k --out OUT

The advantage of a token is its reward to go, whitened over the rollout. There is no
critic and there are no groups. Only the options of the method differ from
`rlhf-jax ppo`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, ClassVar

from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.reinforce import REINFORCE, ReinforceRecipe
from rlhf_jax.train import commands
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig

RECIPE = ReinforceRecipe(temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax reinforce`."""

    name: ClassVar[str] = "reinforce"
    makes: ClassVar[type[PolicyGradient]] = REINFORCE
    method: Annotated[ReinforceRecipe, FLAT] = RECIPE
    """Coefficients and choices of REINFORCE++."""


command = functools.partial(commands.run, Config, description=__doc__)
"""`rlhf-jax reinforce`: runs the command from a command line."""
