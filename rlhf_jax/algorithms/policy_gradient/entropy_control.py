"""Control of the entropy bonus: one coefficient per iteration, from its rollout.

The entropy is that of the policy that drew the tokens, known before the update: it
costs nothing, and the coefficient is the same in every minibatch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.algorithms.policy_gradient.options import EntropyTarget
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.entropy_control import controlled

Array = jax.Array


def control(
    state: TrainState,
    experience: PolicyExperience,
    *,
    rollout: Rollout,
    target: EntropyTarget,
) -> tuple[TrainState, PolicyExperience, masked.Stats]:
    """Adds this iteration's coefficient to the experience, the next one to the state.

    Args:
      rollout: the rows whose entropy counts, `recipe.reported`. If they have no token
        there is no bonus, and the coefficient does not change.

    Returns:
      State and experience, and `objective/entropy_coef`, reward units per nat.

    Raises:
      InputError: the state has no coefficient, see `state.grpo_state`.
    """
    if state.entropy_coef is None:
        raise InputError(
            "expected a state with an entropy_coef for entropy_control, got none; make "
            "it by state.grpo_state(..., entropy_coef=0.0)"
        )
    mask = rollout.response_mask
    mean = masked.masked_mean(rollout.entropy, mask=mask)
    applied, coef = controlled(
        state.entropy_coef,
        # `masked_mean` of no tokens is 0, which is below every target.
        entropy=jnp.where(mask.any(), mean, jnp.nan),
        target=target.target,
        increment=target.increment,
        largest=target.largest,
    )
    # One per row: minibatches and their parts are cut from the experience.
    of_rows = jnp.broadcast_to(applied, experience.response_mask.shape[:1])
    return (
        dataclasses.replace(state, entropy_coef=coef),
        dataclasses.replace(experience, entropy_coef=of_rows),
        {"objective/entropy_coef": (applied, jnp.ones((), jnp.float32))},
    )
