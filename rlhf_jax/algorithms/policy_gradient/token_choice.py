"""The choice of the tokens that the policy loss covers, by the recipe's option.

Tokens are chosen once, among all tokens of a rollout, by the policy that drew them. So
the choice does not depend on minibatches or micro-batches. The authors choose again at
every step, by the current policy.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.algorithms.policy_gradient.options import (
    ClipCov,
    KLCov,
    TokenChoice,
    TopEntropy,
)
from rlhf_jax.functional import masked
from rlhf_jax.functional.errors import refuse
from rlhf_jax.functional.policy_losses.token_choice import covariances, top_share
from rlhf_jax.models.generation import decode

Array = jax.Array


def choose(
    experience: PolicyExperience,
    *,
    rollout: Rollout,
    key: Array | None,
    choice: TokenChoice,
) -> tuple[PolicyExperience, masked.Stats]:
    """Chooses the tokens that are trained on, or that KL-Cov penalises.

    Args:
      rollout: the rollout of these rows, with the sampler's entropies.
      key: of this step. With a row's prompt and sample number it seeds the draws of
        Clip-Cov; the other choices draw nothing, and take None.

    Returns:
      PolicyExperience[B, S], and `policy/chosen`: the share of tokens that are chosen.

    Raises:
      InputError: Clip-Cov without a key.
    """
    mask = experience.response_mask
    covariance = covariances(
        logprobs=experience.old_logprobs, advantages=experience.advantages, mask=mask
    )
    match choice:
        case TopEntropy(share):
            chosen = top_share(rollout.entropy, mask=mask, share=share)
        case KLCov(share):
            chosen = top_share(covariance, mask=mask, share=share)
        case ClipCov(share, low, high):
            missing = "key: expected one for Clip-Cov, got none; give that of the step"
            refuse([missing] if key is None else [])
            assert key is not None
            # 0 and 1 are the keys of the sampler and of `shuffle_key`.
            own = jax.random.fold_in(key, 2)
            keys = decode.row_keys(own, index=rollout.index, sample=rollout.sample)
            width = rollout.tokens.shape[1]
            chance = jax.vmap(lambda key: jax.random.uniform(key, (width,)))(keys)
            among = (covariance > low) & (covariance < high)
            chosen = ~top_share(chance, mask=mask, share=share, among=among)
    stats = {"policy/chosen": chosen.astype(jnp.float32)}
    return (
        dataclasses.replace(experience, chosen=chosen),
        masked.sum_stats(stats, mask=mask),
    )
