"""Choice of the tokens that the policy loss covers: TopEntropy, ClipCov, KLCov.

Tokens are chosen once, among all tokens of a rollout, by the policy that drew them. So
the choice does not depend on minibatches or micro-batches. The authors choose again at
every step, by the current policy.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.functional import checks, masked
from rlhf_jax.models.generation import decode

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TopEntropy:
    """Trains only on the share of tokens with the largest entropies."""

    share: float = 0.2
    """Share of the tokens that are trained on."""

    def __post_init__(self) -> None:
        _check_share(self.share)

    def chosen(
        self, experience: PolicyExperience, *, entropy: Array, chance: Array
    ) -> Array:
        """bool[B, S], tokens that have an advantage."""
        from rlhf_jax.functional.policy_losses import token_choice

        del chance
        mask = experience.response_mask
        return token_choice.top_share(entropy, mask=mask, share=self.share)


@dataclasses.dataclass(frozen=True)
class ClipCov:
    """Tokens with a large covariance of log-prob and advantage have no gradient."""

    share: float = 2e-4
    """Largest share of the tokens that are left out, drawn among those within the
    bounds."""
    low: float = 1.0
    """Tokens with a covariance above this may be left out."""
    high: float = 5.0
    """Tokens with a covariance of this or more are not left out."""

    def __post_init__(self) -> None:
        _check_share(self.share)
        checks.finite(low=self.low)
        checks.within(above=self.low, advice="choose a larger one", high=self.high)

    def chosen(
        self, experience: PolicyExperience, *, entropy: Array, chance: Array
    ) -> Array:
        """bool[B, S], tokens that have an advantage."""
        from rlhf_jax.functional.policy_losses import token_choice

        del entropy
        covariance = _covariances(experience)
        return ~token_choice.top_share(
            chance,
            mask=experience.response_mask,
            share=self.share,
            among=(covariance > self.low) & (covariance < self.high),
        )


@dataclasses.dataclass(frozen=True)
class KLCov:
    """Tokens with the largest covariances are held to the policy that drew them."""

    share: float = 2e-3
    """Share of the tokens that are held."""
    coef: float = 1.0
    """Weight of |log π − log π_old|, reward units per nat."""

    def __post_init__(self) -> None:
        _check_share(self.share)
        checks.positive(coef=self.coef)

    def chosen(
        self, experience: PolicyExperience, *, entropy: Array, chance: Array
    ) -> Array:
        """bool[B, S], tokens that are held to `old_logprobs`."""
        from rlhf_jax.functional.policy_losses import token_choice

        del entropy, chance
        covariance, mask = _covariances(experience), experience.response_mask
        return token_choice.top_share(covariance, mask=mask, share=self.share)


TokenChoice = TopEntropy | ClipCov | KLCov


def choose(
    experience: PolicyExperience,
    *,
    rollout: Rollout,
    step: Array,
    choice: TokenChoice,
) -> tuple[PolicyExperience, masked.Stats]:
    """Chooses tokens of the experience.

    Args:
      rollout: the rollout of these rows, with the sampler's entropies.
      step: i32[], iterations done. With a row's prompt and sample number it seeds the
        draws of Clip-Cov.

    Returns:
      PolicyExperience[B, S], and `policy/chosen`: the share of tokens that are chosen.
    """
    keys = decode.row_keys(
        jax.random.fold_in(jax.random.key(0), step),
        index=rollout.index,
        sample=rollout.sample,
    )
    width = rollout.tokens.shape[1]
    chance = jax.vmap(lambda key: jax.random.uniform(key, (width,)))(keys)
    chosen = choice.chosen(experience, entropy=rollout.entropy, chance=chance)
    stats = {"policy/chosen": chosen.astype(jnp.float32)}
    return (
        dataclasses.replace(experience, chosen=chosen),
        masked.sum_stats(stats, mask=experience.response_mask),
    )


def _check_share(share: float) -> None:
    checks.positive(share=share)
    checks.fraction(share=share)


def _covariances(experience: PolicyExperience) -> Array:
    from rlhf_jax.functional.policy_losses import token_choice

    return token_choice.covariances(
        logprobs=experience.old_logprobs,
        advantages=experience.advantages,
        mask=experience.response_mask,
    )
