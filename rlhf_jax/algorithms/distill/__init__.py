"""On-policy distillation: a student samples, and learns a teacher's distributions."""

from rlhf_jax.algorithms.distill.iteration import learn
from rlhf_jax.algorithms.distill.loss import DistillExperience
from rlhf_jax.algorithms.distill.recipe import Distill, DistillRecipe, Divergence
from rlhf_jax.algorithms.flow.teacher import TeacherStates, head_of, teacher_states
from rlhf_jax.algorithms.policy_gradient.iteration import sample, seen_by_reward

__all__ = [
    "Distill",
    "DistillExperience",
    "DistillRecipe",
    "Divergence",
    "TeacherStates",
    "head_of",
    "learn",
    "sample",
    "seen_by_reward",
    "teacher_states",
]
