"""Which tokens the policy loss is of: TopEntropy, ClipCov, KLCov.

They are chosen once, among all tokens of a rollout, by the policy that has drawn them.
So neither minibatches nor micro-batches change the choice; the authors choose anew at
every step, by the policy as it is then.
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
    """The share of tokens with the largest entropies alone."""

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
    """Covariances above this may be left out."""
    high: float = 5.0
    """Covariances above this are not."""

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
    """Share of the tokens that are."""
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
    """The experience with the tokens of a choice.

    Args:
      rollout: of these rows, with the entropies of whoever drew it.
      step: i32[], iterations done. With a row's prompt and sample number it is the seed
        of what Clip-Cov draws.

    Returns:
      PolicyExperience[B, S], and `policy/chosen`: the share of tokens.
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
