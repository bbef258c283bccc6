"""Nash-MD: a policy gradient on what a judge prefers to samples of a mixture.

    even rows   y  ~ π          trained on: A = P(y beats y') - 1/2 - τ·Σ_t kl_t
    odd rows    y' ~ π^mix      the mixture of π and the frozen reference (`mixture.py`)

It looks for a policy that is preferred to all others, with a KL to the reference of
coefficient τ, not for the highest reward: preferences need no reward that explains
them. Where π^mix is near π its fixed point is π ∝ π_ref exp(P(y beats π)/τ).
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import PolicyExperience, Prompts, Rollout, Scored
from rlhf_jax.algorithms.online_dpo.recipe import Labels
from rlhf_jax.algorithms.policy_gradient import iteration as policy_gradient
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe, one_of
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import checks, masked, token_rewards
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation import decode, mixture
from rlhf_jax.models.generation.mixture import Side
from rlhf_jax.roles import adapted
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.further import References
from rlhf_jax.roles.rewards import Reward

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

    def __post_init__(self) -> None:
        for name in ("fixed_length", "truncate_after", "continuous_batching"):
            if getattr(self, name):
                raise InputError(
                    f"{name}: expected none for Nash-MD, whose mixture is sampled "
                    f"without it, got {getattr(self, name)}; leave it out"
                )
        super().__post_init__()
        one_of(labels=self.labels, among=("ranked", "bradley_terry"))
        if not 0 < self.mixture < 1:
            raise InputError(
                f"mixture: expected a share between 0 and 1, got {self.mixture}; "
                f"choose another"
            )
        if self.aggregation == "prompt_mean":
            raise InputError(
                "aggregation: expected another than 'prompt_mean' for Nash-MD, which "
                "trains on one response to a prompt; choose sequence_mean, its equal"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NashMD(NashMDRecipe, PolicyGradient):
    """A recipe with its shapes and optimizer; hashable, so static under `jax.jit`."""

    def experience(
        self, scored: Scored, *, kl_coef: Array
    ) -> tuple[PolicyExperience, masked.Stats]:
        """Advantages of the even rows; the odd ones are not trained on.

        Args:
          scored: Scored[B, S] of `sample`, pairs of one prompt in neighbouring rows.
          kl_coef: τ, f32[], reward units per nat.

        Returns:
          PolicyExperience[B, S] and {name: (sum, weight)}; `pair/win`: P(y beats y').

        Raises:
          InputError: the number of rows is odd.

        Source: Munos et al. 2023, arXiv:2312.00886, section 7.
        """
        checks.groups(len(scored.scores), group_size=2)
        gap = scored.scores[0::2] - scored.scores[1::2]
        win = jax.nn.sigmoid(gap)
        if self.labels == "ranked":
            win = 0.5 * (1 + jnp.sign(gap))
        mine = jnp.arange(len(scored.scores)) % 2 == 0
        mask = scored.rollout.response_mask & mine[:, None]
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
        return experience, {"pair/win": (win.sum(), jnp.float32(win.size))}

    @property
    def leaves_out(self) -> bool:
        """Half of the responses are not trained on."""
        return True

    def reported(self, rows: Tree) -> Tree:
        """Of the policy's responses alone: the mixture is no policy that is trained.

        Args:
          rows: a pytree of arrays over the B rows of a rollout, or over nothing.
        """
        return jax.tree.map(lambda x: x[0::2] if jnp.ndim(x) else x, rows)

    @property
    def rows_per_prompt(self) -> int:
        """A response of the policy, and one of the mixture."""
        return 2


@jax.named_scope("rollout")
def sample(
    policy: Params,
    reference: Frozen,
    *,
    prompts: Prompts,
    key: Array,
    recipe: NashMD,
    base: Frozen | None = None,
    version: Array | None = None,
) -> Rollout:
    """The rollout of an iteration: the policy's responses and the mixture's, in turn.

    Args:
      policy: the policy's parameters, or its adapters of `base`.
      reference: the frozen model of the mixture and of the KL.
      prompts: Prompts[B, P], each prompt in two neighbouring rows.
      key: of this step, split as in `policy_gradient.sample`.
      recipe: static.
      base: with `recipe.lora` the parameters that the adapters adapt.
      version: i32[], of the policy, `TrainState.step`; None stamps no token.

    Returns:
      Rollout[B, P + R]; `old_logprobs` are those of what each response was drawn from.

    Raises:
      InputError: sizes do not divide, or the reference has another vocabulary.
    """
    checks.groups(len(prompts.index), group_size=2)
    recipe.minibatch_size(len(prompts.index))  # before any work is done in vain
    halves = [jax.tree.map(lambda x, i=i: x[i::2], prompts) for i in (0, 1)]
    sample_key, _ = jax.random.split(key)
    params = adapted.params(policy, base=base, lora=recipe.lora)
    sizes: dict[str, Any] = {
        "max_new_tokens": recipe.max_new_tokens,
        "stop_ids": recipe.stop_ids,
        "temperature": recipe.temperature,
    }
    ours = flow.rollout.rollout(
        params, model=recipe.model, prompts=halves[0], key=sample_key, **sizes
    )
    other = halves[1]
    drawn = mixture.generate(
        Side(params, recipe.model),
        Side(frozen.read(reference), frozen.shape_of(reference, policy=recipe.model)),
        share=recipe.mixture,
        tokens=other.tokens,
        mask=other.mask,
        keys=decode.row_keys(sample_key, index=other.index, sample=other.sample),
        **sizes,
    )
    theirs = Rollout(
        tokens=drawn.tokens,
        mask=drawn.mask,
        response_mask=drawn.response_mask,
        old_logprobs=drawn.logprobs,
        entropy=drawn.entropy,
        index=other.index,
        sample=other.sample,
    )
    both = jax.tree.map(
        lambda a, b: jnp.stack([a, b], axis=1).reshape(-1, *a.shape[1:]), ours, theirs
    )
    if version is None:
        return both
    stamps = jnp.where(both.response_mask, version, 0)
    return dataclasses.replace(both, version=stamps)


def iteration(
    state: TrainState,
    *,
    prompts: Prompts,
    reference: Frozen,
    reward: Reward,
    key: Array,
    recipe: NashMD,
    base: Frozen | None = None,
    further: References | None = None,
) -> tuple[TrainState, masked.Stats, Scored]:
    """One iteration: the responses of policy and mixture, their scores, one update.

    Args:
      state: of `state.grpo_state`; donated by the caller's `jit`.
      prompts: Prompts[B, P], each prompt in two neighbouring rows.
      reference: the frozen model of the mixture and of the KL.
      reward: rollout -> f32[B] or `rewards.Scores`, reward units, in JAX; of a pair's
        two scores `recipe.labels` makes the preference.
      key: of this step, `fold_in(root, step)`.
      recipe: static.
      base: with `recipe.lora` the parameters that the state's adapters adapt.
      further: references of the KL beside the first, by name.

    Returns:
      The next state, stats {name: (sum, weight)}, and the scored rollout [B, P + R], in
      which rows of the policy and of the mixture take turns. Statistics of the
      objective are of the policy's.

    Raises:
      InputError: sizes do not divide, the reference has another vocabulary, or the
        reward is not one number a row.

    Source: Munos et al. 2023, arXiv:2312.00886, section 7.
    """
    rollout = sample(
        state.policy,
        reference,
        prompts=prompts,
        key=key,
        recipe=recipe,
        base=base,
        version=state.step,
    )
    return policy_gradient.learn(
        state,
        rollout=rollout,
        scores=reward(rollout),
        reference=reference,
        key=key,
        recipe=recipe,
        base=base,
        further=further,
    )
