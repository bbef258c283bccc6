"""From the student's samples to its next state.

    sample ─> teacher_states ─> learn = make_experience ─> update
              (the teacher's devices)

`policy_gradient.iteration` takes a `Distill` as well: the teacher is its reference, and
runs within the update.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Rollout, Scored
from rlhf_jax.algorithms.distill.loss import DistillExperience
from rlhf_jax.algorithms.distill.recipe import Distill
from rlhf_jax.algorithms.flow.teacher import TeacherStates
from rlhf_jax.algorithms.policy_gradient.iteration import make_experience
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import masked
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array


def learn(
    state: TrainState,
    *,
    rollout: Rollout,
    scores: Array | rewards.Scores | None,
    head: Frozen,
    states: TeacherStates,
    key: Array,
    recipe: Distill,
    base: Frozen | None = None,
) -> tuple[TrainState, masked.Stats, Scored]:
    """An iteration from the teacher's hidden states on.

    Args:
      state: of `state.grpo_state`; donated by the caller's `jit`.
      rollout: Rollout[B, S], of `sample`.
      scores: f32[B], reward units, or `rewards.Scores`; None without a reward.
      head: of `head_of`.
      states: of `teacher_states`, brought to the student's devices.
      key: of this step, the one that `sample` took.
      recipe: static.
      base: with `recipe.lora` the parameters that the state's adapters adapt.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout. Statistics of
      the reference are of the teacher: `objective/kl` is k1 of student and teacher.

    Raises:
      InputError: sizes do not divide, or the scores are not one number a row.
    """
    rows = rollout.tokens.shape[0]
    state, experience, stats, scored = make_experience(
        state,
        rollout=rollout,
        scores=jnp.zeros(rows, jnp.float32) if scores is None else scores,
        reference=None,
        recipe=recipe,
        ref_logprobs=states.logprobs,
        base=base,
    )
    assert isinstance(experience, DistillExperience)  # as the recipe makes it
    state, update_stats = update(
        state,
        experience=dataclasses.replace(experience, teacher_hidden=states.hidden),
        key=shuffle_key(key),
        recipe=recipe,
        base=base,
        reference=head,
    )
    return state, masked.merge_stats(stats, update_stats), scored
