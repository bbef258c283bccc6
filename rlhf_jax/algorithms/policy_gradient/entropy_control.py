"""Scored rollout -> the coefficient of its entropy bonus, that of the next one beside.

The entropy is that of whoever drew the tokens, before the update: it costs nothing, and
no minibatch changes the coefficient.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.checks import InputError

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class EntropyTarget:
    """The coefficient grows where the entropy is at most the target, else shrinks."""

    target: float = 0.2
    """Nats per token, at or below which there is a bonus."""
    increment: float = 0.005
    """By which the coefficient moves in each iteration, reward units per nat."""
    largest: float = 1.0
    """Upper bound of the coefficient, reward units per nat."""

    def __post_init__(self) -> None:
        checks.positive(**vars(self))


def control(
    state: TrainState,
    experience: PolicyExperience,
    *,
    rollout: Rollout,
    target: EntropyTarget,
) -> tuple[TrainState, PolicyExperience, masked.Stats]:
    """The state with the next coefficient, the experience with that of this iteration.

    Args:
      rollout: the rows whose entropy counts, `recipe.reported`. Without a token in them
        there is no bonus, and the coefficient stays.

    Returns:
      Both, and `objective/entropy_coef`, reward units per nat.

    Raises:
      InputError: the state has no coefficient, see `state.grpo_state`.
    """
    if state.entropy_coef is None:
        raise InputError(
            "expected a state with an entropy_coef for entropy_control, got none; make "
            "it by state.grpo_state(..., entropy_coef=0.0)"
        )
    from rlhf_jax.functional.entropy_control import controlled

    mask = rollout.response_mask
    mean = masked.masked_mean(rollout.entropy, mask=mask)
    applied, coef = controlled(
        state.entropy_coef,
        # The mean of no tokens is 0 there, which would be below every target.
        entropy=jnp.where(mask.any(), mean, jnp.nan),
        target=target.target,
        increment=target.increment,
        largest=target.largest,
    )
    # By row, as minibatches and their parts are cut from the experience.
    of_rows = jnp.broadcast_to(applied, experience.response_mask.shape[:1])
    return (
        dataclasses.replace(state, entropy_coef=coef),
        dataclasses.replace(experience, entropy_coef=of_rows),
        {"objective/entropy_coef": (applied, jnp.ones((), jnp.float32))},
    )
