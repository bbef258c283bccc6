"""Dynamic sampling: batches are drawn until none of their groups has equal scores."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import selection
from rlhf_jax.data import batches
from rlhf_jax.devices import processes
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import StopError
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.grpo.options import VerifiedConfig
from rlhf_jax.train.grpo.programs import Programs
from rlhf_jax.verification.pool import PooledReward

Array = jax.Array
Params = Any


@functools.partial(jax.jit, static_argnames=("group_size",))
def _refilled(
    batch: tuple[Rollout, Scores], drawn: tuple[Rollout, Scores], *, group_size: int
) -> tuple[Rollout, Scores]:
    return selection.refilled(batch, drawn, group_size=group_size)


def fill(
    rollout: Rollout,
    *,
    policy: Params,
    version: Array,
    programs: Programs,
    prompts: batches.Batches[Prompts],
    reward: PooledReward,
    options: VerifiedConfig,
    group_size: int,
    step: int,
    root_key: Array,
) -> tuple[Rollout, Scores, masked.Stats]:
    """A rollout whose groups of equal scores are replaced, as far as the limit allows.

    Draw d of a step takes the prompts and the key of step `step + d * num_steps`, which
    no other draw takes: the run stays a function of its seed, and resumes to the bit.

    Args:
      rollout: of the step's own prompts and key.
      policy: what samples.
      version: i32[], of the policy.
      programs: that sample and verify.
      prompts: of every step, those of other draws among them.
      reward: that verifies, in processes.
      options: of the run; `max_redraws` is the limit.
      group_size: responses to a prompt.
      step: of the run, from 0.
      root_key: of the run; draw d takes `fold_in(root_key, step + d * num_steps)`.

    Returns:
      The rollout, its scores and {name: (sum, weight)}: `group/redraws`, batches drawn
      again, and `group/drawn_equal_fraction`, the share of groups of equal scores in
      all that was drawn.

    Raises:
      StopError: after the last draw every group of the batch has equal scores.
    """
    batch = rollout, programs.verify(rollout, reward=reward)
    equal = _equal(batch[1], group_size)
    of_draws, draws = [equal], 0
    while equal.any() and draws < options.redraws:
        draws += 1
        other = step + draws * options.num_steps
        responses = programs.sample(
            policy,
            prompts=prompts[other],
            key=jax.random.fold_in(root_key, other),
            version=version,
        )
        drawn = responses, programs.verify(responses, reward=reward)
        of_draws.append(_equal(drawn[1], group_size))
        filled = _refilled(batch, drawn, group_size=group_size)
        # On the devices of a rollout that was sampled, or `learn` would compile again.
        batch = jax.device_put(filled, jax.tree.map(lambda x: x.sharding, batch))
        equal = _equal(batch[1], group_size)
    if equal.all():
        raise StopError(
            f"step {step}: expected groups of unequal scores among "
            f"{len(of_draws) * equal.size} in {len(of_draws)} batches, got none, so "
            f"that there is nothing to learn from; choose questions that are solved "
            f"sometimes, a larger --group-size, or --max-redraws 0"
        )
    one = jnp.ones((), jnp.float32)
    every = np.concatenate(of_draws)
    stats: masked.Stats = {
        "group/redraws": (jnp.float32(draws), one),
        "group/drawn_equal_fraction": (
            jnp.float32(every.sum()),
            jnp.float32(every.size),
        ),
    }
    return batch[0], batch[1], stats


def _equal(scores: Scores, group_size: int) -> np.ndarray[Any, Any]:
    """bool[B / G], on the host."""
    groups = processes.whole(scores.total).reshape(-1, group_size)
    return (groups == groups[:, :1]).all(axis=1)
