"""DPO and related losses: learning from preferences without a reward model."""

from rlhf_jax.algorithms.dpo.pair_loss import (
    kto_baseline,
    loss,
    pair_logprobs,
    reference_logprobs,
    token_logprobs,
)
from rlhf_jax.algorithms.dpo.recipe import (
    DPO,
    ORPO,
    REFERENCE_FREE,
    SIMPO,
    DPORecipe,
    PreferenceKind,
)
from rlhf_jax.algorithms.dpo.update import measure, update

__all__ = [
    "DPO",
    "ORPO",
    "REFERENCE_FREE",
    "SIMPO",
    "DPORecipe",
    "PreferenceKind",
    "kto_baseline",
    "loss",
    "measure",
    "pair_logprobs",
    "reference_logprobs",
    "token_logprobs",
    "update",
]
