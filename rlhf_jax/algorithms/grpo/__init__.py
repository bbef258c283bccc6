"""GRPO, RLOO and their kin: groups of samples instead of a critic."""

from rlhf_jax.algorithms.grpo.experience import group_experience
from rlhf_jax.algorithms.grpo.published import (
    CISPO,
    CLIP_COV,
    DAPO,
    DPPO,
    DR_GRPO,
    GDPO,
    GMPO,
    GSPO,
    KL_COV,
    LUSPO,
    OPO,
    PUBLISHED,
    REINFORCE_BASELINE,
    RLOO,
    RLOO_MASKED,
    SAPO,
    SKYWORK_OR1,
    TOP_ENTROPY,
    TOPR,
    VESPO,
)
from rlhf_jax.algorithms.grpo.recipe import GRPO, GroupRecipe
from rlhf_jax.algorithms.policy_gradient.iteration import (
    iteration,
    learn,
    make_experience,
    sample,
    seen_by_reward,
)
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.roles.rewards import Reward

__all__ = [
    "CISPO",
    "CLIP_COV",
    "DAPO",
    "DPPO",
    "DR_GRPO",
    "GDPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "KL_COV",
    "LUSPO",
    "OPO",
    "PUBLISHED",
    "REINFORCE_BASELINE",
    "RLOO",
    "RLOO_MASKED",
    "SAPO",
    "SKYWORK_OR1",
    "TOPR",
    "TOP_ENTROPY",
    "VESPO",
    "GroupRecipe",
    "Reward",
    "group_experience",
    "iteration",
    "learn",
    "make_experience",
    "sample",
    "seen_by_reward",
    "shuffle_key",
    "update",
]
