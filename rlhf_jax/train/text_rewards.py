"""Rewards as trainers call them: Python functions of texts, and reward models."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms import ppo
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import RewardModel
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.json_lines import Row
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.rewards.text import TextReward
from rlhf_jax.runs import (
    command_line,
)
from rlhf_jax.train.packed_rollouts import EndPacker

Array = jax.Array


def load_text_reward(
    option: str, spec: str, *, policy: Pretrained, rows: list[Row]
) -> TextReward:
    """The Python function module:function that an option names."""
    return TextReward(
        function=command_line.load_function(spec),
        decode=policy.decode,
        rows=rows,
        called=f"{option} {spec}",
    )


def text_reward(reward: TextReward, *, mesh: Mesh) -> ppo.Reward:
    """A Python function of texts as a reward; each process scores its own rows."""

    def scored(rollout: Rollout) -> Array:
        return row_sharding.put_computed(
            reward(row_sharding.local_rows(rollout)), mesh=mesh
        )

    return scored


def model_reward(scorer: RewardModel, *, pack: EndPacker) -> ppo.Reward:
    """A reward model, run on its own devices, on packed rows where that is less work.

    Args:
      scorer: the model.
      pack: of a run, which packs what it sees or leaves it padded.
    """
    # An argument of the program: a closure would bake its parameters in.
    reward = rewards.from_model(scorer.frozen, model=scorer.model)
    mesh = frozen.mesh_of(scorer.frozen)
    apply = jax.jit(
        sharding.on(mesh, lambda reward, rollout, packing: reward(rollout, packing))
    )

    def scored(rollout: Rollout) -> Array:
        packing = pack(rollout)
        return frozen_models.run_beside(
            lambda moved: apply(reward, moved, packing), scorer.frozen, rollout
        )

    return scored
