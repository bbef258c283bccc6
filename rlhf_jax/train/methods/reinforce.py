"""REINFORCE++ on your own model, prompts and reward.

    rlhf-jax reinforce --model MODEL --prompts train.jsonl --verifier gsm8k --out OUT

It is `rlhf-jax ppo` with another method: there is no critic and there are no groups,
and the advantage of a token is its reward to go, whitened over the rollout.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

from rlhf_jax.algorithms.reinforce import REINFORCE, ReinforceRecipe
from rlhf_jax.train import commands
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig

RECIPE = ReinforceRecipe(temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax reinforce`."""

    name: ClassVar[str] = "reinforce"
    method: Annotated[ReinforceRecipe, FLAT] = RECIPE
    """Coefficients and choices of REINFORCE++."""

    def algorithm(self, **shapes: Any) -> REINFORCE:
        """The recipe with what a run knows: shapes, optimizer and stop tokens."""
        return REINFORCE(**vars(self.recipe), **shapes)


command = functools.partial(commands.run, Config, description=__doc__)
"""`rlhf-jax reinforce`: from a command line to a run."""
