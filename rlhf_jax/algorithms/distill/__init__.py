"""On-policy distillation: a student learns a teacher's distributions on its samples."""

from rlhf_jax.algorithms.distill.recipe import Distill, DistillRecipe, Divergence
from rlhf_jax.algorithms.flow.teacher import TeacherPrompts, head_of, teacher_states
from rlhf_jax.algorithms.policy_gradient.iteration import (
    iteration,
    learn,
    sample,
    seen_by_reward,
)

__all__ = [
    "Distill",
    "DistillRecipe",
    "Divergence",
    "TeacherPrompts",
    "head_of",
    "iteration",
    "learn",
    "sample",
    "seen_by_reward",
    "teacher_states",
]
