"""Scored -> PolicyExperience: what a response is worth beside others of its prompt."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.functional import masked, token_rewards
from rlhf_jax.functional.advantages import equal_groups, group_relative, leave_one_out

Array = jax.Array
Baseline = Literal["group", "leave_one_out"]
Normalise = Literal["group", "rollout"] | None


def group_experience(
    scored: Scored,
    *,
    kl_coef: Array | float,
    group_size: int,
    baseline: Baseline,
    normalise: Normalise,
) -> tuple[PolicyExperience, masked.Stats]:
    """Scored -> PolicyExperience: advantages over the samples of one prompt.

    With R_i the sum of a response's token rewards, the score and -β·KL where that is
    in the reward, every token of response i has the advantage

        group            R_i - mean(R), over std(R) where normalised by the group
        leave_one_out    R_i - mean of the others

    Args:
      scored: Scored[B, S], the groups in neighbouring rows.
      kl_coef: β, f32[], reward units per nat.
      group_size: number of responses to each prompt, in neighbouring rows.
      baseline: "group" or "leave_one_out", what is subtracted from R_i.
      normalise: the standard deviation that divides advantages: "group", "rollout" (of
        all tokens, whose mean is subtracted first) or None.

    Returns:
      PolicyExperience[B, S] and {name: (sum, weight)}. `group/equal_fraction`: share of
      groups whose rewards are all the same, which teach nothing; `group/std`: mean
      standard deviation (ddof 1) within a group, reward units.

    Raises:
      InputError: the groups do not divide the rows.

    Source: Shao et al. 2024, arXiv:2402.03300 (GRPO); Ahmadian et al. 2024,
    arXiv:2402.14740 (RLOO).
    """
    mask = scored.rollout.response_mask
    rewards = token_rewards.token_rewards(
        scores=scored.scores, kl=scored.kl, mask=mask, kl_coef=kl_coef
    )
    totals = masked.masked_sum(rewards, mask=mask, axis=1)
    if baseline == "group":
        of_rows = group_relative(
            totals, group_size=group_size, normalise=normalise == "group"
        )
    else:
        of_rows = leave_one_out(totals, group_size=group_size)
    advantages = jnp.broadcast_to(of_rows[:, None], mask.shape)
    one_prompt = _of_one_prompt(scored.rollout.index, group_size)
    advantages = jnp.where(one_prompt[:, None], advantages, jnp.nan)
    advantages = jnp.where(mask, advantages, 0.0)
    if normalise == "rollout":
        advantages = masked.masked_whiten(advantages, mask=mask)
    experience = PolicyExperience(
        tokens=scored.rollout.tokens,
        mask=scored.rollout.mask,
        response_mask=mask,
        old_logprobs=scored.rollout.old_logprobs,
        ref_logprobs=scored.ref_logprobs,
        token_rewards=rewards,
        advantages=advantages,
    )
    return experience, _group_stats(totals, group_size)


def _of_one_prompt(index: Array, group_size: int) -> Array:
    """bool[B]: all rows of a row's group respond to the same prompt."""
    of_groups = index.reshape(-1, group_size)
    same = (of_groups == of_groups[:, :1]).all(axis=1)
    return jnp.repeat(same, group_size)


def _group_stats(totals: Array, group_size: int) -> masked.Stats:
    equal = equal_groups(totals, group_size=group_size)
    spread = jnp.std(totals.reshape(-1, group_size), axis=1, ddof=1)
    count = jnp.asarray(equal.size, jnp.float32)
    return {
        "group/equal_fraction": (equal.sum(dtype=jnp.float32), count),
        "group/std": (spread.sum(), count),
    }
