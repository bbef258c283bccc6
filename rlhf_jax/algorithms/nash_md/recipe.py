"""Nash-MD: a policy gradient on preferences over samples of a mixture.

    even rows   y  ~ π          trained on: A = P(y beats y') - 1/2 - τ·Σ_t kl_t
    odd rows    y' ~ π^mix      the mixture of π and the frozen reference (`mixture.py`)

It seeks a policy that is preferred to all others, with a KL penalty of coefficient τ,
instead of the highest reward: preferences need not come from a reward. Where π^mix is
near π, the fixed point is π ∝ π_ref exp(P(y beats π)/τ).
"""

# A ClassVar here removes the field of the parent.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import PolicyExperience, Prompts, Rollout, Scored
from rlhf_jax.algorithms.online_dpo.recipe import Labels
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.functional import checks, masked, token_rewards
from rlhf_jax.functional.checks import InputError, one_of
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.models.generation import decode, mixture
from rlhf_jax.models.generation.sampling import Decoder
from rlhf_jax.roles.reference.frozen import (
    NO_MODELS,
    FrozenModels,
    adapted_params,
    read,
    shape_of,
)

Array = jax.Array
Params = Any
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NashMDRecipe(PolicyRecipe):
    """The coefficients and choices of Nash-MD."""

    mixture: float = 0.125
    """Share of the reference in the log-probs of the mixture, between 0 and 1."""
    labels: Labels = "bradley_terry"
    """Preference of a response: bradley_terry is σ of the difference of the scores,
    ranked is 1 for the higher score and 1/2 for equal ones."""
    num_epochs: int = 1
    """Number of passes over each batch."""

    # Not options here: the mixture is sampled without them.
    fixed_length: ClassVar[None] = None
    continuous_batching: ClassVar[None] = None
    # Half of the rows come from the mixture, which records no experts.
    routing_replay: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(labels=self.labels, among=("ranked", "bradley_terry"))
        checks.within(above=0, below=1, advice="choose another", mixture=self.mixture)
        expect_none(
            "for Nash-MD, whose mixture records no likeliest tokens",
            advice="choose another surrogate",
            **{"top_k of surrogate": self.recorded_top_k},
        )
        if self.aggregation == "prompt_mean":
            raise InputError(
                "aggregation: expected another than 'prompt_mean' for Nash-MD, which "
                "trains on one response to a prompt; choose sequence_mean, its equal"
            )

    @property
    def rows_per_prompt(self) -> int:
        """2: a response of the policy and one of the mixture."""
        return 2

    @property
    def trained_share(self) -> float:
        """1/2: the policy's responses, without those of the mixture."""
        return 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class NashMD(NashMDRecipe, PolicyGradient):
    """A recipe with its shapes and optimizer; hashable, so static under `jax.jit`."""

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """Advantages of the even rows; the odd ones are not trained on.

        Args:
          scored: Scored[B, S] of `sample`, pairs of one prompt in neighbouring rows.

        Returns:
          PolicyExperience[B, S] and {name: (sum, weight)}; `pair/win`: P(y beats y').
          A pair is not trained on if `scored.row_mask` leaves one of the two out.

        Source: Munos et al. 2023, arXiv:2312.00886, section 7.
        """
        checks.groups(len(scored.scores), group_size=2)
        gap = scored.scores[0::2] - scored.scores[1::2]
        win = jax.nn.sigmoid(gap)
        if self.labels == "ranked":
            win = 0.5 * (1 + jnp.sign(gap))
        mine = jnp.arange(len(scored.scores)) % 2 == 0
        both = jnp.ones(win.shape, bool)
        if scored.row_mask is not None:
            both = scored.row_mask[0::2] & scored.row_mask[1::2]
            # A preference needs both scores.
            mine &= jnp.repeat(both, 2)
        mask = scored.rollout.response_mask & mine[:, None]
        # ½ is the policy's win rate against itself: an unbiased baseline. Odd rows are
        # masked.
        rewards = token_rewards.token_rewards(
            scores=jnp.repeat(win - 0.5, 2), kl=scored.kl, mask=mask, kl_coef=kl_coef
        )
        totals = masked.masked_sum(rewards, mask=mask, axis=1)
        experience = PolicyExperience(
            tokens=scored.rollout.tokens,
            mask=scored.rollout.mask,
            response_mask=mask,
            old_logprobs=scored.rollout.old_logprobs,
            ref_logprobs=scored.ref_logprobs,
            token_rewards=rewards,
            advantages=jnp.where(mask, totals[:, None], 0.0),
        )
        return experience, masked.sum_stats({"pair/win": win}, mask=both)

    @jax.named_scope("rollout")
    def rollout(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        frozen: FrozenModels = NO_MODELS,
        version: Array | None = None,
    ) -> Rollout:
        """Samples responses of the policy (even rows) and of the mixture (odd rows).

        Returns:
          Rollout[B, P + R]; `old_logprobs` are of the policy or mixture that drew each.
        """
        checks.groups(len(prompts.index), group_size=2)
        if frozen.reference is None:
            raise InputError(
                "reference: expected one for Nash-MD, which samples a mixture of it "
                "and the policy, got none; pass it in frozen"
            )
        # Prompts come in pairs of rows: one for the policy, one for the mixture.
        halves = [jax.tree.map(lambda x, i=i: x[i::2], prompts) for i in (0, 1)]
        sizes: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": self.stop_ids,
            "temperature": self.temperature,
        }
        ours = flow.rollout.rollout(
            policy,
            model=self.model,
            prompts=halves[0],
            key=key,
            version=version,
            **sizes,
        )
        other = halves[1]
        ref_model = shape_of(frozen.reference, policy=self.model)
        reference = read(frozen.reference)
        # Under LoRA a reference that moves is adapters, too; a fixed one is the base.
        if self.lora is not None and self.lifecycle.moves:
            reference = adapted_params(reference, base=frozen.base, lora=self.lora)
        drawn = mixture.generate(
            Decoder(policy, self.model),
            Decoder(reference, ref_model),
            share=self.mixture,
            tokens=other.tokens,
            mask=other.mask,
            # Sample numbers differ within a pair, and so do its two keys.
            keys=decode.row_keys(key, index=other.index, sample=other.sample),
            **sizes,
        )
        theirs = flow.rollout.of_generated(drawn, prompts=other, version=version)
        return jax.tree.map(
            # Interleave: rows 2i and 2i + 1 respond to one prompt.
            lambda a, b: jnp.stack([a, b], axis=1).reshape(-1, *a.shape[1:]),
            ours,
            theirs,
        )

    @property
    def leaves_out(self) -> bool:
        """Whether some responses are not trained on: the mixture's half."""
        return True

    def reported(self, rows: Tree) -> Tree:
        """The rows of the policy's responses, without those of the mixture."""
        return jax.tree.map(lambda x: x[0::2] if jnp.ndim(x) else x, rows)
