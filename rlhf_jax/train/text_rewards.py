"""Rewards as trainers call them: Python functions of texts, and reward models."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms import ppo
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import RewardModel
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.text import Written
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.rewards.ensembles import Combine
from rlhf_jax.roles.rewards.text import TextReward
from rlhf_jax.runs import (
    command_line,
)
from rlhf_jax.train.packed_rollouts import EndPacker

Array = jax.Array


def load_text_reward(
    option: str,
    spec: str,
    *,
    policy: Pretrained,
    rows: list[Row],
    asked: Sequence[Written] | None = None,
) -> TextReward:
    """The Python function module:function that an option names.

    Args:
      asked: the prompts of the rows as they were written; None decodes their tokens.
    """
    return TextReward(
        function=command_line.load_function(spec),
        decode=policy.decode,
        rows=rows,
        called=f"{option} {spec}",
        asked=asked,
    )


def text_reward(reward: TextReward, *, mesh: Mesh) -> ppo.Reward:
    """A Python function of texts as a reward; each process scores its own rows."""

    def scored(rollout: Rollout) -> Array:
        return row_sharding.put_computed(
            reward(row_sharding.local_rows(rollout)), mesh=mesh
        )

    return scored


def model_reward(
    scorers: Sequence[RewardModel],
    *,
    pack: EndPacker,
    how: Combine = "mean",
    std_coef: float = 1.0,
) -> ppo.Reward:
    """Reward models, run on their own devices, on packed rows where that is less work.

    Args:
      scorers: one model, or several to combine.
      pack: of a run, which packs what it sees or leaves it padded.
      how, std_coef: of `rewards.combine`; read where there are several.
    """
    # An argument of the program: a closure would bake its parameters in.
    members = [rewards.from_model(each.frozen, model=each.model) for each in scorers]
    mesh = frozen.mesh_of(scorers[0].frozen)
    apply = jax.jit(
        sharding.on(mesh, lambda reward, rollout, packing: reward(rollout, packing))
    )
    combine = jax.jit(functools.partial(rewards.combine, how=how, std_coef=std_coef))

    def scored(rollout: Rollout) -> Array | rewards.Scores:
        packing = pack(rollout)
        scores = [
            frozen_models.run_beside(
                functools.partial(apply, member, packing=packing), each.frozen, rollout
            )
            for member, each in zip(members, scorers, strict=True)
        ]
        return scores[0] if len(scores) == 1 else combine(scores)

    return scored
