"""The critic of a recipe, and its values of a rollout."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from rlhf_jax.algorithms.batch import Rollout, RolloutPacking
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, adapted_params

Array = jax.Array
Params = Any


class Critic(NamedTuple):
    """What computes the values of a rollout."""

    params: Params  # {"trunk": ..., "score": ...}, as in `critic.py`
    model: ModelConfig
    after_stop: bool  # the state after the last token has a value


def critic_of(
    state: TrainState, *, recipe: PolicyGradient, frozen: FrozenModels
) -> Critic | None:
    """The critic of a state: a model, adapters of the base, or a head on the policy."""
    if recipe.critic is None:
        return None
    if state.critic is None:
        raise InputError(
            "expected values where the critic is apart from the state, got none; "
            "pass those of critic_apart.values"
        )
    adapt = {"base": frozen.base, "lora": recipe.lora}
    if recipe.critic.shared_trunk:
        # `state.critic` holds the head alone here: the trunk is not stored twice.
        trunk = adapted_params(state.policy, **adapt)
        params = {"trunk": trunk, "score": state.critic["score"]}
    else:
        params = adapted_params(state.critic, **adapt)
    return Critic(params, recipe.critic.model, recipe.critic.after_stop)


def values(
    state: TrainState,
    *,
    rollout: Rollout,
    recipe: PolicyGradient,
    frozen: FrozenModels = NO_MODELS,
    packing: RolloutPacking | None = None,
) -> Array | None:
    """The critic's values of a rollout, which `learn` computes if they are not passed.

    As a program by itself it runs while the host computes the scores.

    Returns:
      f32[B, S], reward units, 0 where a state has no value; None for an algorithm
      without a critic.
    """
    critic = critic_of(state, recipe=recipe, frozen=frozen)
    if critic is None:
        return None
    return score.response_values(
        critic.params,
        rollout=rollout,
        model=critic.model,
        max_new_tokens=recipe.max_new_tokens,
        after_stop=critic.after_stop,
        packing=None if packing is None else packing.batch,
    )
