"""REINFORCE++ on the signs of its advantages, for the command `my_method`.

A method is a recipe, an experience and a loss. This one has its own experience, and
takes every option of `rlhf-jax reinforce`.
"""

import dataclasses

import jax.numpy as jnp

from rlhf_jax.algorithms.reinforce import REINFORCE
from rlhf_jax.train import commands
from rlhf_jax.train.methods import reinforce


class Method(REINFORCE):
    """The algorithm: the advantages of a scored batch, and the loss."""

    def experience(self, scored, *, kl_coef):
        """Gives every response token the advantage 1, 0 or -1."""
        experience, stats = super().experience(scored, kl_coef=kl_coef)
        signs = jnp.sign(experience.advantages)
        return dataclasses.replace(experience, advantages=signs), stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(reinforce.Config):
    """The options of the command."""

    name = "my_method"

    def algorithm(self, **shapes):
        """Builds the algorithm from the recipe and the run's shapes and optimizer."""
        return Method(**vars(self.recipe), **shapes)


def command(argv=None):
    """Runs the method from a command line."""
    commands.run(Config, description=__doc__, argv=argv)
