"""Rollout -> Rollout: the best sample of each prompt, or groups with mixed scores.

    rollout(group_size=n) ─> reward ─> best_of_n ─> Rollout[B / n], scores [B / n]
    two rollouts of groups, scored   ─> refilled ─> Rollout[B], Scores

Best-of-n trains nothing and samples n responses per prompt. A trained policy has to
beat it at the same KL (`best_of_n.kl_bound`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import checks, masked
from rlhf_jax.functional.advantages import equal_groups
from rlhf_jax.functional.best_of_n import (
    estimated_log_ratio,
    finite_or_lowest,
    kl_bound,
)
from rlhf_jax.roles.rewards import Scores

Array = jax.Array


def best_of_n(
    rollout: Rollout, *, scores: Array, group_size: int
) -> tuple[Rollout, Array]:
    """Selects the response with the highest score to each prompt.

        row        0  1  2 | 3  4  5       group_size = 3: rows g·n to g·n + n - 1
        scores     1  0  2 | 4  4  NaN
        kept             2   3             ties go to the first

    Samples of a prompt are independent, so taking the first breaks ties at random.

    Args:
      rollout: Rollout[B, S], the samples of a prompt in neighbouring rows.
      scores: f32[B], reward units. A score that is not finite wins only if no score of
        its group is finite.
      group_size: n, samples of a prompt, 1 or more; divides B.

    Returns:
      Rollout[B / n, S], and its scores f32[B / n], in the order of the prompts.
      `old_logprobs` are still those of the sampled policy, not of best-of-n.

    Source: Stiennon et al. 2020, arXiv:2009.01325, appendix; Nakano et al. 2021,
    arXiv:2112.09332, section 3.2.
    """
    rows = rollout.tokens.shape[0]
    checks.shape((rows,), scores=scores)
    checks.float32(scores=scores)
    checks.groups(rows, group_size=group_size)
    # A NaN would win every argmax.
    groups = finite_or_lowest(scores).reshape(-1, group_size)
    first = jnp.arange(0, rows, group_size, dtype=jnp.int32)
    best = first + jnp.argmax(groups, axis=1).astype(jnp.int32)
    return jax.tree.map(lambda leaf: leaf[best], rollout), scores[best]


def refilled(
    batch: tuple[Rollout, Scores], drawn: tuple[Rollout, Scores], *, group_size: int
) -> tuple[Rollout, Scores]:
    """Replaces groups of equal scores by mixed groups of another draw.

        group      0      1      2            group_size = 2
        batch      1 1    0 1    0 0          groups 0 and 2 teach nothing
        drawn      0 0    1 0    1 1          its group 1 is mixed
        refilled   1 0    0 1    0 0          one is still to be replaced

    The j-th group to replace becomes the j-th mixed group of `drawn`; where there are
    fewer mixed groups, the last ones stay. Responses that are left out do not count.
    This is one draw of dynamic sampling (DAPO).

    Args:
      batch, drawn: Rollout[B, S] and its Scores[B], the groups in neighbouring rows;
        both of one width.
      group_size: G, 2 or more; divides B.

    Source: Yu et al. 2025, arXiv:2503.14476, section 3.2 and eq. 11.
    """
    equal, mixed = (
        equal_groups(
            scores.total,
            group_size=group_size,
            row_mask=None if scores.left_out is None else ~scores.left_out,
        )
        for _, scores in (batch, drawn)
    )
    mixed = ~mixed
    count = equal.size
    # Indices of the mixed groups first, in order; the others are not read.
    first_mixed = jnp.argsort(~mixed, stable=True).astype(jnp.int32)
    # j of each group to replace, from 0; clamped before the first.
    turn = jnp.maximum(jnp.cumsum(equal, dtype=jnp.int32) - 1, 0)
    replaced = equal & (turn < mixed.sum(dtype=jnp.int32))
    own = jnp.arange(count, dtype=jnp.int32)
    source = jnp.where(replaced, count + first_mixed[turn], own)
    member = jnp.arange(group_size, dtype=jnp.int32)
    rows = (source[:, None] * group_size + member[None, :]).reshape(-1)
    # One gather from both batches: shapes stay fixed, however many are replaced.
    return jax.tree.map(
        lambda left, right: jnp.concatenate([left, right])[rows], batch, drawn
    )


def kl_stats(scores: Array, *, among: Array, n: int) -> masked.Stats:
    """The KL of best-of-n to the reference, estimated and bounded.

    Args:
      scores: f32[G, C], of C chosen responses to each of G prompts.
      among: f32[G, M], of other samples of the same prompts.

    Returns:
      {name: (sum, weight)}: the estimate `best_of_n/kl` and its upper bound
      `best_of_n/kl_bound`, nats per response.
    """
    log_ratio = estimated_log_ratio(scores, among=among, n=n)
    count = jnp.asarray(log_ratio.size, jnp.float32)
    return {
        "best_of_n/kl": (log_ratio.sum(), count),
        "best_of_n/kl_bound": (kl_bound(n) * count, count),
    }
