"""PPO with the critic in separate programs, which run beside the policy's.

    sample ─┬─> reward, reference ─┬─> ppo.make_experience ─┬─> ppo.update
            └─> values ────────────┘                        └─> update ─ ─> values
    above: the policy's devices; below: the critic's

The policy's state has no critic (`state.grpo_state`), so `ppo.update` trains the policy
alone. The critic's state comes from `state.supervised_state` with
`PPO.critic_optimizer`.

The two models share no parameter and no gradient, so this is `ppo.iteration` in another
order: same minibatches, same results. The critic's update may last into the next
rollout, which does not read it. Guards that leave out a step of both models are refused
(`PPO.refuse_critic_apart`); a gradient that is not finite skips the step of its own
model only.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import state
from rlhf_jax.algorithms.batch import Experience, Rollout, RolloutPacking
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.update import minibatches
from rlhf_jax.algorithms.ppo.loss import critic_loss, whitened
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.algorithms.state import (
    PackedParts,
    SupervisedState,
    packed_parts,
)
from rlhf_jax.functional import masked
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, adapted_params

Array = jax.Array
Params = Any


def values(
    critic: Params,
    *,
    rollout: Rollout,
    recipe: PPO,
    frozen: FrozenModels = NO_MODELS,
    packing: RolloutPacking | None = None,
) -> Array:
    """The critic's values of a rollout, f32[B, S], reward units."""
    return score.response_values(
        adapted_params(critic, base=frozen.base, lora=recipe.lora),
        rollout=rollout,
        model=recipe.critic_model,
        max_new_tokens=recipe.max_new_tokens,
        after_stop=recipe.value_after_stop,
        packing=None if packing is None else packing.batch,
    )


def update(
    critic: SupervisedState,
    *,
    experience: Experience,
    key: Array,
    recipe: PPO,
    frozen: FrozenModels = NO_MODELS,
    packing: RolloutPacking | None = None,
) -> tuple[SupervisedState, masked.Stats]:
    """The critic's part of `ppo.update`: c_v·value_loss over the same minibatches.

    Args:
      critic: donated by the caller's `jit`.
      key: the key of `ppo.update`, from `ppo.shuffle_key`.

    Returns:
      The next state, whose `step` counts minibatches, and stats of the value loss with
      `critic/grad_norm`, `critic/skipped` and `critic/skipped_in_a_row`.

    Raises:
      InputError: batch sizes do not divide, critic and policy share a trunk, or
        stop_approxkl or max_ratio_mean is set.
    """
    recipe.refuse_critic_apart()
    # The policy's program draws the same order from the same key.
    order = minibatches(key, rows=experience.tokens.shape[0], recipe=recipe)

    def step(
        critic: SupervisedState, turn: tuple[Array, PackedParts | None]
    ) -> tuple[SupervisedState, masked.Stats]:
        chosen, parts = turn
        minibatch = jax.tree.map(lambda leaf: leaf[chosen], experience)
        # Whitened rewards change the returns that the critic regresses on.
        minibatch = whitened(minibatch, recipe=recipe)
        value_mask = minibatch.value_mask
        loss = functools.partial(
            critic_loss,
            num_values=value_mask.sum(dtype=jnp.float32),
            num_valued=value_mask.any(axis=1).sum(dtype=jnp.float32),
            recipe=recipe,
            frozen=frozen,
        )
        grads, stats = state.accumulate(
            loss,
            critic.params,
            minibatch,
            micro_batch_size=recipe.micro_batch_size,
            parts=parts,
        )
        return state.supervised_step(
            critic, grads, stats, optimizer=recipe.critic_optimizer
        )

    parts = packed_parts(packing, steps=len(order))
    critic, stats = jax.lax.scan(step, critic, (order, parts))
    stats = masked.total_stats(stats)
    # The policy's program has counters of the same names.
    return critic, {name.replace("update/", "critic/"): x for name, x in stats.items()}
