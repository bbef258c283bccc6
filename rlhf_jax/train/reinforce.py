"""REINFORCE++ on your own model and questions, with a verifier of its responses.

    rlhf-jax reinforce --model MODEL --data train.jsonl --held-out test.jsonl --out OUT

It is `rlhf-jax grpo` with another recipe: there are no groups, and the advantage of a
token is its reward to go, whitened over the rollout. Data, verifier and run folder are
the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from rlhf_jax.algorithms.reinforce import REINFORCE, ReinforceRecipe
from rlhf_jax.runs import command_line
from rlhf_jax.train.grpo.options import WITH_TURNS, VerifiedConfig
from rlhf_jax.train.grpo.trainer import main

RECIPE = ReinforceRecipe(temperature=1.0)
SCREEN = {
    **WITH_TURNS,
    "Training": (
        *("num_steps", "batch_size", "learning_rate", "reinforce.micro_batch_size"),
        "dtype",
    ),
    "Run": ("out", "resume"),
}
"""The options of --help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(VerifiedConfig):
    """The options of `rlhf-jax reinforce`."""

    reinforce: Annotated[ReinforceRecipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of REINFORCE++, options without a prefix."""

    @property
    def recipe(self) -> ReinforceRecipe:
        """The coefficients and choices of REINFORCE++."""
        return self.reinforce

    def algorithm(self, **shapes: Any) -> REINFORCE:
        """The recipe with what a run knows: shapes, optimizer and stop tokens."""
        return REINFORCE(**vars(self.reinforce), **shapes)


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax reinforce`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        screen=SCREEN,
        prog="rlhf-jax reinforce",
        argv=argv,
    )
