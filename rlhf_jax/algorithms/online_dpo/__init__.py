"""Online DPO: pairs of the policy's own samples, ranked by a reward or a judge."""

from rlhf_jax.algorithms.online_dpo.pairs import OnlineDPO
from rlhf_jax.algorithms.online_dpo.recipe import OnlineDPORecipe
from rlhf_jax.algorithms.policy_gradient.iteration import (
    iteration,
    learn,
    make_experience,
    sample,
)
from rlhf_jax.algorithms.policy_gradient.update import update

__all__ = [
    "OnlineDPO",
    "OnlineDPORecipe",
    "iteration",
    "learn",
    "make_experience",
    "sample",
    "update",
]
