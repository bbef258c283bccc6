"""Surrogates with other trust regions than PPO's clip of the ratio.

    divergence_masks      DPPO: leaves out tokens that moved too far, by TV or KL
    response_weights      VESPO, TOPR: weights by the ratio of a whole response
    advantage_regression  DAR: a weighted log-likelihood
    geometric_mean        GMPO: the geometric mean of the clipped ratios of a response
    score_centring        a policy gradient without the drift towards its sampler
    sequence_mask         DeepSeek-V3.2: masks bad responses that have become unlikely
    token_choice          trains on some tokens only: by entropy, Clip-Cov, KL-Cov

All losses are aggregated, and report ratios, as `losses.policy_loss` does.
"""

from rlhf_jax.functional.policy_losses.advantage_regression import dar_loss
from rlhf_jax.functional.policy_losses.divergence_masks import dppo_loss
from rlhf_jax.functional.policy_losses.geometric_mean import gmpo_loss
from rlhf_jax.functional.policy_losses.response_weights import topr_loss, vespo_loss
from rlhf_jax.functional.policy_losses.score_centring import centred_loss
from rlhf_jax.functional.policy_losses.sequence_mask import off_policy_mask
from rlhf_jax.functional.policy_losses.token_choice import (
    covariances,
    kl_cov_loss,
    top_share,
)

__all__ = [
    "centred_loss",
    "covariances",
    "dar_loss",
    "dppo_loss",
    "gmpo_loss",
    "kl_cov_loss",
    "off_policy_mask",
    "top_share",
    "topr_loss",
    "vespo_loss",
]
