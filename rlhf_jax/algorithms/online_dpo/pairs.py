"""Online DPO: DPO's loss on pairs of the policy's own samples, ranked by a reward.

    Scored ──groups──> PairExperience ──update──> TrainState

A row of the experience is a pair, its preferred response and then the other:

    columns         0 ... S-1                S ... 2S-1
    tokens          prompt and chosen        the same prompt and rejected

The reference is frozen, as in every policy gradient, and β is the coefficient of
E[r] - β·KL. With Bradley-Terry labels the expected gradient is 0 at
π* ∝ π_ref exp(r/β), whatever the pairs. With ranked labels it is not: π moves until one
response is left, which need not be the best.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PairExperience, Scored
from rlhf_jax.algorithms.flow import ledger
from rlhf_jax.algorithms.online_dpo.recipe import OnlineDPORecipe
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.loss import mean_distance
from rlhf_jax.algorithms.state import LossFunction
from rlhf_jax.functional import checks, losses, masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.models.packing import Packing
from rlhf_jax.roles import policy
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, adapted_params

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineDPO(OnlineDPORecipe, PolicyGradient):
    """A recipe with its shapes and optimizer; hashable, so static under `jax.jit`.

    `OnlineDPO(**vars(recipe), model=...)` makes one from an `OnlineDPORecipe`.
    """

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PairExperience, masked.Stats]:
        """Makes pairs of each group, the response with the higher score first.

        Returns:
          PairExperience of N pairs and {name: (sum, weight)}. `pair/score_gap`: the
          difference of the scores, reward units; `pair/tied_fraction`: share of pairs
          with equal scores, which ranked labels leave out. Responses that
          `scored.row_mask` leaves out are in no pair.

        Raises:
          InputError: the groups do not divide the rows, or there is no reference.
        """
        del kl_coef
        if scored.ref_logprobs is None:
            raise InputError(
                "expected a reference, as DPO is a loss of log-ratios to one, got "
                "none; give one"
            )
        rows = len(scored.scores)
        checks.groups(rows, group_size=self.group_size)
        size = self.responses_per_pair
        row_mask = jnp.ones(rows, bool) if scored.row_mask is None else scored.row_mask
        row_mask = row_mask.reshape(-1, size)
        scores = scored.scores.reshape(-1, size)
        first = size * jnp.arange(len(scores))
        # Among equal scores the first is the best and the last the worst, so that the
        # two differ.
        best = first + jnp.argmax(jnp.where(row_mask, scores, -jnp.inf), axis=1)
        lowest = jnp.where(row_mask, scores, jnp.inf)[:, ::-1]
        worst = first + size - 1 - jnp.argmin(lowest, axis=1)
        compared = row_mask.sum(axis=1) >= 2
        gap = jnp.where(compared, scored.scores[best] - scored.scores[worst], 0.0)
        tied = gap == 0
        # An infinite score on one side has no usable preference.
        pairs = compared & jnp.isfinite(gap)
        if self.labels == "ranked":
            pairs &= ~tied

        # Chosen and rejected share a row: shuffling and micro-batches keep pairs.
        def laid_out(x: Array) -> Array:
            return jnp.concatenate([x[best], x[worst]], axis=1)

        rollout = scored.rollout
        nothing = jnp.zeros((len(best), 2 * rollout.tokens.shape[1]), jnp.float32)
        experience = PairExperience(
            tokens=laid_out(rollout.tokens),
            mask=laid_out(rollout.mask),
            response_mask=laid_out(rollout.response_mask),
            old_logprobs=laid_out(rollout.old_logprobs),
            ref_logprobs=laid_out(scored.ref_logprobs),
            token_rewards=nothing,
            advantages=nothing,
            pairs=pairs,
            # The expected label has the gradient of a drawn one, with less noise.
            rejected_better=jnp.where(
                self.labels == "ranked", 0.0, jax.nn.sigmoid(-gap)
            ).astype(jnp.float32),
            members=jnp.stack([best, worst], axis=1).astype(jnp.int32),
        )
        return experience, masked.sum_stats(
            {"pair/score_gap": gap, "pair/tied_fraction": tied.astype(jnp.float32)},
            mask=compared,
        )

    def minibatch_loss(
        self,
        minibatch: PairExperience,
        *,
        kl_coef: Array,
        frozen: FrozenModels = NO_MODELS,
    ) -> tuple[PairExperience, LossFunction]:
        """`losses.dpo_loss` of the pairs; `kl_coef` is its β."""
        expect_none(
            "beside the one reference of online DPO",
            advice="leave them out",
            further=", ".join(frozen.further) or None,
        )
        num_pairs = minibatch.pairs.sum(dtype=jnp.float32)

        def loss(
            trained: tuple[Array, Array],
            part: PairExperience,
            packing: Packing | None = None,
        ) -> tuple[Array, masked.Stats]:
            if packing is not None:
                raise InputError("packing: expected none for online DPO; leave it out")
            pairs = part.tokens.shape[0]

            # [b, 2S] -> [2b, S]: both responses of a pair in one forward pass.
            def apart(x: Array) -> Array:
                return x.reshape(2 * pairs, -1)

            logprobs, entropy = policy.logprobs_and_entropy(
                adapted_params(trained[0], base=frozen.base, lora=self.lora),
                model=self.model,
                tokens=apart(part.tokens),
                mask=apart(part.mask),
                temperature=self.temperature,
            )
            mask = apart(part.response_mask)
            assert part.ref_logprobs is not None
            ours, theirs = (
                masked.masked_sum(x, mask=mask, axis=1).reshape(pairs, 2)
                for x in (logprobs, apart(part.ref_logprobs))
            )
            smoothing = 0.0 if self.labels == "ranked" else part.rejected_better
            value, stats = losses.dpo_loss(
                chosen_logprobs=ours[:, 0],
                rejected_logprobs=ours[:, 1],
                ref_chosen_logprobs=theirs[:, 0],
                ref_rejected_logprobs=theirs[:, 1],
                beta=kl_coef,
                kind=self.kind,
                label_smoothing=smoothing,
                num_pairs=num_pairs,
                mask=part.pairs,
            )
            stats["policy/sampler_mismatch"] = mean_distance(
                jax.lax.stop_gradient(logprobs), apart(part.old_logprobs), mask=mask
            )
            if part.sampled is not None:
                stats |= ledger.sums(
                    jax.tree.map(apart, part.sampled),
                    logprobs=logprobs,
                    entropy=entropy,
                    mask=apart(part.mask),
                    max_new_tokens=self.max_new_tokens,
                    vocab_size=self.model.num_tokens,
                )
            return value, stats

        return minibatch, loss
