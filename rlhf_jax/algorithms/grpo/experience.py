"""Scored -> PolicyExperience: advantages of responses within groups of one prompt."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.algorithms.flow.score import ended
from rlhf_jax.functional import aggregation, masked, token_rewards
from rlhf_jax.functional.advantages import (
    decoupled,
    equal_groups,
    group_relative,
    leave_one_out,
    length_weighted,
    over_greedy,
)

Array = jax.Array
Baseline = Literal["group", "leave_one_out", "length_weighted", "greedy"]
Normalise = Literal["group", "rollout", "each"] | None
OverlongMask = Literal["loss", "group"] | None
EqualGroups = Literal["keep", "leave_out"]


def group_experience(
    scored: Scored,
    *,
    kl_coef: Array | float,
    group_size: int,
    baseline: Baseline,
    normalise: Normalise,
    kl_to_go: bool = False,
    overlong_mask: OverlongMask = None,
    equal: EqualGroups = "keep",
    stop_ids: tuple[int, ...] = (),
    prompt_mean: bool = False,
) -> tuple[PolicyExperience, masked.Stats]:
    """Computes advantages over the samples of one prompt.

    R_i is the sum of the token rewards of response i: the score, and -β·KL if the KL is
    in the reward. Every token of response i has the advantage below. An episode of
    several turns is one response. Responses that `scored.row_mask` leaves out do not
    count in their group.

        group            R_i - mean(R), divided by std(R) with normalise "group"
        leave_one_out    R_i - mean of the others
        length_weighted  R_i - Σ_j l_j·R_j / Σ_j l_j, l_j the tokens of response j
        greedy           R_i - R of the greedy response, the last row of the group

    With normalise "each" the advantage is `advantages.decoupled` of `scored.rewards`.

    With `kl_to_go` R_i is the score alone, and the advantage of token t also has

        -β Σ_{s >= t} kl_s

    the reward to go of the KL. Its expected gradient is that of -β·KL, whatever the
    baseline and the std (with k1: full reverse).

    Args:
      equal: "leave_out" leaves groups of equal rewards out of the loss and of its
        divisor.
      prompt_mean: also compute `prompt_scale` over the tokens that are trained on.
      the others: options of `GroupRecipe`.

    Returns:
      PolicyExperience[B, S], whose `response_mask` is False where a response is left
      out, and {name: (sum, weight)}. `group/equal_fraction`: share of groups whose
      rewards are all equal, so that advantages are 0. `group/std`: mean over groups of
      two or more sampled responses with a score of their standard deviation (ddof 1),
      reward units. `response/masked`, where options or the greedy baseline leave
      responses out: the share of those.

    Source: Shao et al. 2024, arXiv:2402.03300 (GRPO); Ahmadian et al. 2024,
    arXiv:2402.14740 (RLOO); Li et al. 2023, arXiv:2310.10505 (ReMax); Hao et al. 2025,
    arXiv:2505.23585 (OPO); Liu et al. 2026, arXiv:2601.05242 (GDPO); Yu et al. 2025,
    arXiv:2503.14476, sections 3.2 and 3.4 (DAPO: masks); Yao et al. 2026,
    arXiv:2601.10201, abstract (FRPO: the future KL).
    """
    mask = scored.rollout.response_mask
    rewards = token_rewards.token_rewards(
        scores=scored.scores, kl=scored.kl, mask=mask, kl_coef=kl_coef
    )
    # f32[B]: score and -β·KL of the whole response, which is one action here.
    totals = masked.masked_sum(rewards, mask=mask, axis=1)
    if kl_to_go:
        # A response without a token has no reward, as in the sum above.
        totals = jnp.where(mask.any(axis=1), scored.scores, 0.0)
    if scored.turn_rewards is not None:
        # After the totals, so that rounding of turns' shares cannot split equal scores.
        rewards = token_rewards.token_rewards(
            scores=scored.scores,
            kl=scored.kl,
            mask=mask,
            kl_coef=kl_coef,
            turn_rewards=scored.turn_rewards,
        )
    finished, row_mask = None, scored.row_mask
    if overlong_mask is not None:
        finished = ended(scored.rollout, stop_ids=stop_ids)
        # Only "group" leaves them out of the baseline too. With "loss" (DAPO) the
        # baseline includes responses that the loss leaves out, which biases it.
        if overlong_mask == "group":
            row_mask = finished if row_mask is None else finished & row_mask
    groups = {"group_size": group_size, "row_mask": row_mask}
    alike = equal_groups(totals, **groups)
    if normalise == "each":
        parts = zip(scored.rewards, scored.weights, strict=True)
        # Rewards of weight 0 are only logged.
        counted = [(one, weight) for one, weight in parts if weight] or [(totals, 1.0)]
        terms, weights = zip(*counted, strict=True)
        weights = jnp.array(weights, jnp.float32)
        of_rows = decoupled(jnp.stack(terms), weights=weights, **groups)
        # Groups with equal sums of rewards may still have advantages.
        alike = jnp.stack([equal_groups(one, **groups) for one in terms]).all(axis=0)
    elif baseline == "group":
        of_rows = group_relative(totals, normalise=normalise == "group", **groups)
    elif baseline == "length_weighted":
        lengths = mask.sum(axis=1, dtype=jnp.float32)
        of_rows = length_weighted(totals, lengths=lengths, **groups)
    elif baseline == "greedy":
        of_rows = over_greedy(totals, **groups)
    else:
        of_rows = leave_one_out(totals, **groups)
    # `scored.row_mask`, not `row_mask`: cut-off responses have a reward to report.
    spread, trained = scored.row_mask, finished
    if baseline == "greedy":
        sampled = jnp.arange(len(totals)) % group_size != group_size - 1
        trained = sampled if trained is None else trained & sampled
        spread = sampled if spread is None else spread & sampled
    stats = _group_stats(totals, alike, group_size=group_size, row_mask=spread)
    if equal == "leave_out":
        mixed = jnp.repeat(~alike, group_size)
        trained = mixed if trained is None else trained & mixed
    if trained is not None:
        # In the mask, not in the advantages: aggregations divide by counts of the mask.
        mask &= trained[:, None]
        out = (~trained).sum(dtype=jnp.float32)
        stats["response/masked"] = (out, jnp.asarray(trained.size, jnp.float32))
    advantages = jnp.broadcast_to(of_rows[:, None], mask.shape)
    one_prompt = _of_one_prompt(scored.rollout.index, group_size)
    # Traced code cannot raise. Where the rows of a group have different prompts, NaN
    # makes the gradient not finite, so the update is skipped and counted.
    advantages = jnp.where(one_prompt[:, None], advantages, jnp.nan)
    advantages = jnp.where(mask, advantages, 0.0)
    if normalise == "rollout":
        advantages = masked.masked_whiten(advantages, mask=mask)
    if kl_to_go and scored.kl is not None:
        # After whitening: baseline, std and whitening act on the score alone.
        kl = jnp.where(mask, scored.kl, 0.0)
        to_go = jnp.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
        advantages -= jnp.where(mask, kl_coef * to_go, 0.0)
    experience = PolicyExperience(
        tokens=scored.rollout.tokens,
        mask=scored.rollout.mask,
        response_mask=mask,
        old_logprobs=scored.rollout.old_logprobs,
        ref_logprobs=scored.ref_logprobs,
        token_rewards=rewards,
        advantages=advantages,
        prompt_scale=aggregation.prompt_scale(mask, group_size=group_size)
        if prompt_mean
        else None,
    )
    return experience, stats


def _of_one_prompt(index: Array, group_size: int) -> Array:
    """bool[B]: all rows of a row's group respond to the same prompt."""
    of_groups = index.reshape(-1, group_size)
    same = (of_groups == of_groups[:, :1]).all(axis=1)
    return jnp.repeat(same, group_size)


def _group_stats(
    totals: Array, equal: Array, *, group_size: int, row_mask: Array | None
) -> masked.Stats:
    """`group/equal_fraction`; `group/std` over groups with two or more responses."""
    groups = totals.reshape(-1, group_size)
    count = spreading = jnp.asarray(equal.size, jnp.float32)
    if row_mask is None:
        spread = jnp.std(groups, axis=1, ddof=1)
    else:
        within = row_mask.reshape(groups.shape)
        several = within.sum(axis=1) >= 2
        # A group with one response has no deviation: read all its rows, count none.
        spread = jnp.std(groups, axis=1, ddof=1, where=within | ~several[:, None])
        spread = jnp.where(several, spread, 0.0)
        spreading = several.sum(dtype=jnp.float32)
    return {
        "group/equal_fraction": (equal.sum(dtype=jnp.float32), count),
        "group/std": (spread.sum(), spreading),
    }
