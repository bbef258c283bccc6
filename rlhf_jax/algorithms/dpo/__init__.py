"""DPO and its kin: preferences without a reward model."""

from rlhf_jax.algorithms.dpo.update import (
    DPO,
    DPORecipe,
    loss,
    measure,
    pair_logprobs,
    reference_logprobs,
    token_logprobs,
    update,
)

__all__ = [
    "DPO",
    "DPORecipe",
    "loss",
    "measure",
    "pair_logprobs",
    "reference_logprobs",
    "token_logprobs",
    "update",
]
